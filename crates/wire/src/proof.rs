//! Challenge and response with the volume's key (HMAC-SHA-256, RFC 2104). The key is never sent.

use ashlar_replication::values::{Epoch, MemberId, VolumeId};
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::{Digest as _, Sha256};

/// A volume's key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct VolumeKey(pub [u8; 32]);

impl core::fmt::Debug for VolumeKey {
    /// Keeps keys out of logs.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("VolumeKey(…)")
    }
}

/// A challenge; fresh for every connection.
pub type Nonce = [u8; 16];
/// A response.
pub type Proof = [u8; 32];

/// The challenges of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Challenges {
    /// Drawn by the initiator.
    pub client: Nonce,
    /// Drawn by the storage node.
    pub server: Nonce,
}

/// What a proof is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subject {
    /// The volume.
    pub volume: VolumeId,
    /// The member that is asked.
    pub member: MemberId,
    /// The epoch to be promised.
    pub epoch: Epoch,
    /// The attachment's handle on the connection.
    pub handle: u32,
}

fn mac(key: &VolumeKey, label: &[u8], first: &Nonce, second: &Nonce, s: &Subject) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(&key.0).expect("HMAC takes keys of any length");
    mac.update(label);
    mac.update(first);
    mac.update(second);
    mac.update(&s.volume.0);
    mac.update(&s.member.device.0);
    mac.update(&s.member.nonce.to_le_bytes());
    mac.update(&s.epoch.number.0.to_le_bytes());
    mac.update(&s.epoch.nonce.to_le_bytes());
    mac.update(&s.handle.to_le_bytes());
    mac
}

fn promise_mac(key: &VolumeKey, c: &Challenges, s: &Subject, answer: &[u8]) -> Hmac<Sha256> {
    let mut mac = mac(key, b"ashlar promise v1", &c.client, &c.server, s);
    mac.update(&Sha256::digest(answer));
    mac
}

/// The initiator's proof that it knows the key; binds the connection, the epoch and the handle.
pub fn fence_proof(key: &VolumeKey, challenges: &Challenges, subject: &Subject) -> Proof {
    mac(
        key,
        b"ashlar fence v1",
        &challenges.server,
        &challenges.client,
        subject,
    )
    .finalize()
    .into_bytes()
    .into()
}

/// Checks [`fence_proof`] in constant time.
pub fn verify_fence(key: &VolumeKey, c: &Challenges, subject: &Subject, proof: &Proof) -> bool {
    mac(key, b"ashlar fence v1", &c.server, &c.client, subject)
        .verify_slice(proof)
        .is_ok()
}

/// The member's proof that it knows the key; binds its answer, too.
pub fn promise_proof(key: &VolumeKey, c: &Challenges, subject: &Subject, answer: &[u8]) -> Proof {
    promise_mac(key, c, subject, answer)
        .finalize()
        .into_bytes()
        .into()
}

/// Checks [`promise_proof`] in constant time.
pub fn verify_promise(
    key: &VolumeKey,
    challenges: &Challenges,
    subject: &Subject,
    answer: &[u8],
    proof: &Proof,
) -> bool {
    promise_mac(key, challenges, subject, answer)
        .verify_slice(proof)
        .is_ok()
}
