//! Proofs bind everything that they are about, and stay what they are.

mod common;

use ashlar_replication::values::*;
use ashlar_wire::proof::*;
use ashlar_wire::*;
use common::*;

/// Computed by another implementation of HMAC-SHA-256, from docs/wire-format.md.
#[test]
fn proofs_are_those_of_the_document() {
    let hex = |proof: Proof| proof.map(|byte| format!("{byte:02x}")).concat();
    let fence = fence_proof(&KEY, &CHALLENGES, &subject());
    assert_eq!(
        hex(fence),
        "3657abbb4924831450ebb5647139a3d2ee6e5994cab50dce142a6803c32003b5"
    );
    let promise = promise_proof(&KEY, &CHALLENGES, &subject(), b"the answer");
    assert_eq!(
        hex(promise),
        "a5043c645fbce6c1bd3a4d4532b7dd6c7711052157031c6f61b624fc2bb733af"
    );
}

#[test]
fn a_proof_with_any_bit_changed_does_not_verify() {
    let proof = fence_proof(&KEY, &CHALLENGES, &subject());
    for bit in 0..256 {
        let mut wrong = proof;
        wrong[bit / 8] ^= 1 << (bit % 8);
        assert!(!verify_fence(&KEY, &CHALLENGES, &subject(), &wrong));
    }
}

#[test]
fn a_key_is_not_shown() {
    assert_eq!(format!("{KEY:?}"), "VolumeKey(…)");
}

#[test]
fn proofs_bind_key_connection_epoch_handle_and_answer() {
    let proof = fence_proof(&KEY, &CHALLENGES, &subject());
    assert!(verify_fence(&KEY, &CHALLENGES, &subject(), &proof));
    assert!(!verify_fence(
        &VolumeKey([8; 32]),
        &CHALLENGES,
        &subject(),
        &proof
    ));
    let other = Challenges {
        server: [3; 16],
        ..CHALLENGES
    };
    assert!(!verify_fence(&KEY, &other, &subject(), &proof));
    for change in [
        Subject {
            handle: 13,
            ..subject()
        },
        Subject {
            volume: VolumeId([1; 16]),
            ..subject()
        },
        Subject {
            member: member(2).id,
            ..subject()
        },
        Subject {
            epoch: Epoch {
                nonce: 1,
                ..subject().epoch
            },
            ..subject()
        },
    ] {
        assert!(
            !verify_fence(&KEY, &CHALLENGES, &change, &proof),
            "{change:?}"
        );
    }
    let mut out = Vec::new();
    encode::promised(&mut out, &KEY, &CHALLENGES, &subject(), &promise());
    let Frame::Promised {
        handle: 12,
        promise: back,
        answer,
        proof,
    } = whole(&out)
    else {
        panic!()
    };
    assert_eq!(back, promise());
    assert!(verify_promise(
        &KEY,
        &CHALLENGES,
        &subject(),
        answer,
        &proof
    ));
    assert!(!verify_promise(
        &KEY,
        &CHALLENGES,
        &subject(),
        &answer[1..],
        &proof
    ));
    // A fence's proof is none of a promise: the labels differ.
    let fence = fence_proof(&KEY, &CHALLENGES, &subject());
    assert!(!verify_promise(
        &KEY,
        &CHALLENGES,
        &subject(),
        answer,
        &fence
    ));
}
