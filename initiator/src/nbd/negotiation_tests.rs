//! Options, good and bad.

use super::*;
use ashlar_replication::values::VolumeId;
use proptest::prelude::*;

struct One(VolumeInfo);

impl Exports for One {
    fn find(&self, name: &str) -> Option<(VolumeHandle, &VolumeInfo)> {
        (name.is_empty() || name == self.0.name).then_some((VolumeHandle(3), &self.0))
    }
    fn names(&self) -> Vec<String> {
        vec![self.0.name.clone()]
    }
}

fn exports() -> One {
    One(VolumeInfo {
        id: VolumeId([1; 16]),
        name: "data".into(),
        size_bytes: 1 << 30,
        access: VolumeAccess::ReadWrite,
    })
}

fn option_bytes(kind: u32, data: &[u8]) -> Vec<u8> {
    let mut out = OPTION_MAGIC.to_be_bytes().to_vec();
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
    out
}

fn named(name: &str, rest: &[u8]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend_from_slice(name.as_bytes());
    data.extend_from_slice(rest);
    data
}

/// Feeds everything; returns the last step and the kinds of the replies.
fn run(negotiation: &mut Negotiation, input: &[u8]) -> (Step, Vec<u32>) {
    let (mut at, mut out) = (0, Vec::new());
    let step = loop {
        match negotiation.step(&input[at..], &exports(), &mut out) {
            Step::Used(bytes) => at += bytes,
            other => break other,
        }
    };
    let mut kinds = Vec::new();
    let mut rest = &out[..];
    while rest.len() >= 20 && u64_at(rest, 0) == 0x0003_e889_0455_65a9 {
        kinds.push(u32_at(rest, 12));
        rest = &rest[20 + u32_at(rest, 16) as usize..];
    }
    (step, kinds)
}

fn greeted() -> Negotiation {
    let mut negotiation = Negotiation::default();
    let mut out = Vec::new();
    assert_eq!(
        negotiation.step(&3_u32.to_be_bytes(), &exports(), &mut out),
        Step::Used(4)
    );
    negotiation
}

#[test]
fn go_leads_to_the_transmission_phase_with_the_informations_asked_for() {
    let info = [0, 2, 0, 1, 0, 3];
    let input = option_bytes(option::GO, &named("data", &info));
    let (step, kinds) = run(&mut greeted(), &input);
    assert_eq!(step, Step::Transmission(input.len(), VolumeHandle(3)));
    assert_eq!(kinds, [reply::INFO, reply::INFO, reply::INFO, reply::ACK]);
}

#[test]
fn an_unknown_export_an_unknown_option_and_tls_get_the_errors_of_the_protocol() {
    let mut input = option_bytes(option::GO, &named("other", &[0, 0]));
    input.extend(option_bytes(option::STARTTLS, &[]));
    input.extend(option_bytes(99, &[1, 2, 3]));
    input.extend(option_bytes(11, &[]));
    input.extend(option_bytes(option::INFO, &[0, 0]));
    input.extend(option_bytes(
        option::SET_META_CONTEXT,
        &named("data", &[0, 0, 0, 0]),
    ));
    let (step, kinds) = run(&mut greeted(), &input);
    let expected = [
        reply::UNKNOWN,
        reply::POLICY,
        reply::UNSUPPORTED,
        reply::UNSUPPORTED,
        reply::INVALID,
        reply::INVALID,
    ];
    assert_eq!((step, kinds.as_slice()), (Step::Need(16), &expected[..]));
}

#[test]
fn base_allocation_counts_only_for_the_export_it_was_chosen_for() {
    let query = named("base:allocation", &[]);
    let mut list = 1_u32.to_be_bytes().to_vec();
    list.extend(query);
    let mut input = option_bytes(option::STRUCTURED_REPLY, &[]);
    input.extend(option_bytes(
        option::SET_META_CONTEXT,
        &named("data", &list),
    ));
    input.extend(option_bytes(option::GO, &named("data", &[0, 0])));
    let mut negotiation = greeted();
    let (step, kinds) = run(&mut negotiation, &input);
    assert!(matches!(step, Step::Transmission(..)));
    let expected = [
        reply::ACK,
        reply::META_CONTEXT,
        reply::ACK,
        reply::INFO,
        reply::ACK,
    ];
    assert_eq!(kinds, expected);
    assert!(negotiation.structured && negotiation.block_status);
}

#[test]
fn an_option_that_is_too_long_is_read_past() {
    let mut input = option_bytes(option::INFO, &vec![0; OPTION_BYTES_MAX as usize + 1]);
    input.extend(option_bytes(option::LIST, &[]));
    let (step, kinds) = run(&mut greeted(), &input);
    assert_eq!(
        (step, kinds),
        (
            Step::Need(16),
            vec![reply::TOO_BIG, reply::SERVER, reply::ACK]
        )
    );
}

#[test]
fn every_prefix_asks_for_more_and_the_pieces_come_to_the_same() {
    let mut input = 3_u32.to_be_bytes().to_vec();
    input.extend(option_bytes(option::STRUCTURED_REPLY, &[]));
    input.extend(option_bytes(option::LIST, &[]));
    input.extend(option_bytes(99, &[1, 2, 3]));
    input.extend(option_bytes(option::GO, &named("data", &[0, 1, 0, 3])));
    let whole = run(&mut Negotiation::default(), &input);
    assert!(matches!(whole.0, Step::Transmission(..)));
    for cut in 0..input.len() {
        let (mut negotiation, mut at, mut out) = (Negotiation::default(), 0, Vec::new());
        let mut wanted = 0;
        for end in [cut, input.len()] {
            loop {
                match negotiation.step(&input[at..end], &exports(), &mut out) {
                    Step::Used(bytes) => at += bytes,
                    Step::Need(bytes) => {
                        wanted = at + bytes;
                        break;
                    }
                    step => {
                        assert_eq!(
                            (step, end),
                            (
                                Step::Transmission(input.len() - at, VolumeHandle(3)),
                                input.len()
                            ),
                            "cut at {cut}"
                        );
                        break;
                    }
                }
            }
            if end == cut {
                assert!(
                    wanted > cut && wanted <= input.len(),
                    "cut at {cut}: {wanted}"
                );
            }
        }
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic_and_always_move_on(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        kind in 0_u32..12,
        data in proptest::collection::vec(any::<u8>(), 0..64),
    ) {
        for input in [bytes, option_bytes(kind, &data)] {
            let mut negotiation = greeted();
            negotiation.structured = true;
            let (mut at, mut out) = (0, Vec::new());
            while let Step::Used(used) = negotiation.step(&input[at..], &exports(), &mut out) {
                prop_assert!(used > 0);
                at += used;
            }
        }
    }
}
