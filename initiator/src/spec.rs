//! What an attachment needs to know about a volume, and the limits of every field.

use std::time::Duration;

use ashlar_engine::Address;
use ashlar_replication::configuration::{Ack, Member, Role};
use ashlar_replication::values::{BLOCK_BYTES, EXTENT_BYTES, MEMBERS_MAX, VolumeId};
use ashlar_wire::proof::VolumeKey;

use crate::front_end::VolumeAccess;

/// The largest volume: 64 TiB. The store's index and its tables are sized for it.
pub const VOLUME_BYTES_MAX: u64 = 64 << 40;
/// The longest name, in bytes. NBD allows 4096; a file name allows 255, and volumes give names to files.
pub const NAME_BYTES_MAX: usize = 255;
/// The longest wait for a quorum that can be asked for: a day. For ever is `None`.
pub const IO_TIMEOUT_MAX: Duration = Duration::from_secs(86_400);
/// The most writes that a replica may lag; what a lagging replica has not answered stays in memory.
pub const LAG_WRITES_MAX: u64 = 1 << 20;
/// The most bytes that a replica may lag.
pub const LAG_BYTES_MAX: u64 = 1 << 30;

/// A member and where to reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberSpec {
    /// Who, and as what.
    pub member: Member,
    /// Data address of its device.
    pub address: Address,
}

/// Settings of an attachment; `None` means the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeOptions {
    /// In-sync members without which writes wait. Default: 2 of three and more data members, else 1.
    pub min_in_sync: Option<usize>,
    /// How long a request waits for a quorum before it fails. Default: for ever.
    pub io_timeout: Option<Duration>,
    /// Writes that a replica may lag before it leaves the stream.
    pub lag_writes_max: Option<u64>,
    /// Bytes that a replica may lag before it leaves the stream.
    pub lag_bytes_max: Option<u64>,
}

/// A volume to attach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeSpec {
    /// Its UUID.
    pub id: VolumeId,
    /// Its name, unique on this initiator; NBD's export name.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
    /// Whether front ends may write.
    pub access: VolumeAccess,
    /// What attachments prove to know.
    pub key: VolumeKey,
    /// Which acknowledgements a write waits for; fixed when the volume was made.
    pub ack: Ack,
    /// All members, witnesses included.
    pub members: Vec<MemberSpec>,
    /// Settings.
    pub options: VolumeOptions,
}

/// Why a [`VolumeSpec`] is refused. The message names the field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct SpecError {
    /// The field, as the attach API names it.
    pub field: &'static str,
    /// What is wrong with it.
    pub problem: String,
}

impl SpecError {
    pub(crate) fn new(field: &'static str, problem: impl Into<String>) -> SpecError {
        SpecError {
            field,
            problem: problem.into(),
        }
    }
}

impl VolumeSpec {
    /// Checks every field against its limits.
    ///
    /// # Errors
    /// The first field that is outside.
    pub fn check(&self) -> Result<(), SpecError> {
        check_name(&self.name)?;
        check_size(self.size_bytes)?;
        self.check_members()?;
        self.check_options()
    }

    fn check_members(&self) -> Result<(), SpecError> {
        let bad = |problem: String| Err(SpecError::new("members", problem));
        let count = self.members.len();
        if count == 0 || count > MEMBERS_MAX {
            return bad(format!(
                "a volume has 1 to {MEMBERS_MAX} members, not {count}"
            ));
        }
        for (i, one) in self.members.iter().enumerate() {
            let others = &self.members[i + 1..];
            if others
                .iter()
                .any(|other| other.member.id.device == one.member.id.device)
            {
                return bad(format!("device {} is named twice", one.member.id.device));
            }
        }
        if self.data_members() == 0 {
            return bad("at least one member must hold data".into());
        }
        Ok(())
    }

    fn check_options(&self) -> Result<(), SpecError> {
        let VolumeOptions {
            min_in_sync,
            io_timeout,
            lag_writes_max,
            lag_bytes_max,
        } = &self.options;
        let data = self.data_members();
        if min_in_sync.is_some_and(|min| min == 0 || min > data) {
            let problem = format!("must be 1 to {data}, the number of data members");
            return Err(SpecError::new("options.min_in_sync", problem));
        }
        if io_timeout.is_some_and(|t| t.is_zero() || t > IO_TIMEOUT_MAX) {
            let problem = format!("must be 1 ms to {} s", IO_TIMEOUT_MAX.as_secs());
            return Err(SpecError::new("options.io_timeout_ms", problem));
        }
        if lag_writes_max.is_some_and(|n| n == 0 || n > LAG_WRITES_MAX) {
            let problem = format!("must be 1 to {LAG_WRITES_MAX}");
            return Err(SpecError::new("options.lag_writes_max", problem));
        }
        if lag_bytes_max.is_some_and(|n| !(EXTENT_BYTES..=LAG_BYTES_MAX).contains(&n)) {
            let problem = format!("must be {EXTENT_BYTES} (one extent) to {LAG_BYTES_MAX}");
            return Err(SpecError::new("options.lag_bytes_max", problem));
        }
        Ok(())
    }

    /// Number of members that hold data.
    pub fn data_members(&self) -> usize {
        self.members
            .iter()
            .filter(|m| m.member.role == Role::Data)
            .count()
    }

    /// Number of blocks.
    pub fn size_blocks(&self) -> u64 {
        self.size_bytes / BLOCK_BYTES as u64
    }

    /// Whether `other` describes the same attachment. Sizes and addresses aside: a volume grows, and
    /// a node moves.
    pub fn is_same_attachment(&self, other: &VolumeSpec) -> bool {
        let of = |spec: &VolumeSpec| {
            let mut members: Vec<_> = spec.members.iter().map(|m| m.member).collect();
            // The order in which members are named says nothing.
            members.sort();
            members
        };
        let mut same = other.clone();
        same.size_bytes = self.size_bytes;
        same.members.clone_from(&self.members);
        of(self) == of(other) && *self == same
    }
}

/// Checks the name of a volume.
///
/// # Errors
/// When it is empty, too long, or has characters that files, URIs or logs have trouble with.
pub fn check_name(name: &str) -> Result<(), SpecError> {
    let bad = |problem: &str| Err(SpecError::new("name", problem));
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        return bad(&format!("must have 1 to {NAME_BYTES_MAX} bytes"));
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if !name.chars().all(allowed) || name.starts_with(['.', '-']) {
        return bad(
            "may have letters, digits, '-', '_' and '.', and starts with neither '-' nor '.'",
        );
    }
    Ok(())
}

/// Checks the size of a volume.
///
/// # Errors
/// When it is no multiple of a block, zero, or above [`VOLUME_BYTES_MAX`].
pub fn check_size(size_bytes: u64) -> Result<(), SpecError> {
    if size_bytes == 0 || size_bytes > VOLUME_BYTES_MAX {
        let problem = format!("{size_bytes} is not within 4096 to {VOLUME_BYTES_MAX}");
        return Err(SpecError::new("size_bytes", problem));
    }
    if !size_bytes.is_multiple_of(BLOCK_BYTES as u64) {
        let problem = format!("{size_bytes} is no multiple of {BLOCK_BYTES}");
        return Err(SpecError::new("size_bytes", problem));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ashlar_replication::values::{DeviceId, MemberId};

    fn member(n: u8, role: Role) -> MemberSpec {
        let id = MemberId {
            device: DeviceId([n; 16]),
            nonce: u64::from(n),
        };
        let address = format!("tcp:127.0.0.1:{n}").parse().unwrap();
        MemberSpec {
            member: Member { id, role },
            address,
        }
    }

    fn spec() -> VolumeSpec {
        VolumeSpec {
            id: VolumeId([1; 16]),
            name: "data-1".into(),
            size_bytes: 1 << 30,
            access: VolumeAccess::ReadWrite,
            key: VolumeKey([7; 32]),
            ack: Ack::Majority,
            members: vec![
                member(1, Role::Data),
                member(2, Role::Data),
                member(3, Role::Data),
            ],
            options: VolumeOptions::default(),
        }
    }

    fn refused(change: impl FnOnce(&mut VolumeSpec)) -> &'static str {
        let mut spec = spec();
        change(&mut spec);
        spec.check().unwrap_err().field
    }

    #[test]
    fn every_field_outside_its_limits_is_named() {
        assert_eq!(spec().check(), Ok(()));
        for name in ["", "a/b", "a b", ".x", "-x", "ü", &"x".repeat(256)] {
            assert_eq!(refused(|s| s.name = name.into()), "name", "{name}");
        }
        for size in [0, 1, 4095, 4097, VOLUME_BYTES_MAX + 4096, u64::MAX] {
            assert_eq!(refused(|s| s.size_bytes = size), "size_bytes", "{size}");
        }
        assert_eq!(refused(|s| s.members.clear()), "members");
        assert_eq!(
            refused(|s| s.members = vec![member(1, Role::Witness)]),
            "members"
        );
        assert_eq!(refused(|s| s.members[1] = member(1, Role::Data)), "members");
        assert_eq!(
            refused(|s| s.members = (1..9).map(|n| member(n, Role::Data)).collect()),
            "members"
        );
        assert_eq!(
            refused(|s| s.options.min_in_sync = Some(4)),
            "options.min_in_sync"
        );
        assert_eq!(
            refused(|s| s.options.min_in_sync = Some(0)),
            "options.min_in_sync"
        );
        let day = IO_TIMEOUT_MAX + Duration::from_millis(1);
        assert_eq!(
            refused(|s| s.options.io_timeout = Some(day)),
            "options.io_timeout_ms"
        );
        assert_eq!(
            refused(|s| s.options.lag_writes_max = Some(1 << 21)),
            "options.lag_writes_max"
        );
        assert_eq!(
            refused(|s| s.options.lag_bytes_max = Some(4096)),
            "options.lag_bytes_max"
        );
    }

    #[test]
    fn the_order_of_members_their_addresses_and_the_size_make_no_other_attachment() {
        let mut other = spec();
        other.members.reverse();
        other.members[0].address = "tcp:127.0.0.1:99".parse().unwrap();
        other.size_bytes *= 2;
        assert!(spec().is_same_attachment(&other));
        other.key = VolumeKey([8; 32]);
        assert!(!spec().is_same_attachment(&other));
        let mut replaced = spec();
        replaced.members[0].member.id.nonce += 1;
        assert!(!spec().is_same_attachment(&replaced));
    }
}
