//! The attach API's requests as values, every field checked.

use std::time::Duration;

use ashlar_control_api::{initiator as api, storage_node as node_api};
use ashlar_engine::Address;
use ashlar_replication::configuration::{Ack, Member, Role};
use ashlar_replication::values::{DeviceId, MEMBERS_MAX, MemberId, VolumeId};
use ashlar_wire::proof::VolumeKey;

use crate::front_end::VolumeAccess;
use crate::spec::{MemberSpec, SpecError, VolumeOptions, VolumeSpec};

/// Bytes of a volume's key.
const KEY_BYTES: usize = 32;
/// The longest address: a host name of 253 bytes or a socket path of 107, with scheme and port.
const ADDRESS_BYTES_MAX: usize = 280;

fn bad<T>(field: &'static str, problem: impl Into<String>) -> Result<T, SpecError> {
    Err(SpecError {
        field,
        problem: problem.into(),
    })
}

fn uuid(field: &'static str, text: &str) -> Result<[u8; 16], SpecError> {
    // Longer texts are not repeated to whoever sent them.
    if text.len() > 64 {
        return bad(field, "is no UUID");
    }
    match uuid::Uuid::try_parse(text) {
        Ok(uuid) if !uuid.is_nil() => Ok(*uuid.as_bytes()),
        _ => bad(field, format!("{text:?} is no UUID")),
    }
}

/// The volume that a request names.
///
/// # Errors
/// When it is no UUID.
pub fn volume_id(text: &str) -> Result<VolumeId, SpecError> {
    uuid("volume_id", text).map(VolumeId)
}

fn member(entry: &api::MemberAddress) -> Result<MemberSpec, SpecError> {
    let Some(member) = &entry.member else {
        return bad("members.member", "is missing");
    };
    let device = DeviceId(uuid("members.member.device_id", &member.device_id)?);
    let role = match node_api::Role::try_from(member.role) {
        Ok(node_api::Role::Data) => Role::Data,
        Ok(node_api::Role::Witness) => Role::Witness,
        _ => return bad("members.member.role", "must be ROLE_DATA or ROLE_WITNESS"),
    };
    let address = address(&entry.data_address)?;
    let id = MemberId {
        device,
        nonce: member.nonce,
    };
    Ok(MemberSpec {
        member: Member { id, role },
        address,
    })
}

fn address(text: &str) -> Result<Address, SpecError> {
    let field = "members.data_address";
    if text.len() > ADDRESS_BYTES_MAX {
        return bad(field, format!("is longer than {ADDRESS_BYTES_MAX} bytes"));
    }
    match text.parse() {
        Ok(Address::Tcp(address)) if address.port() == 0 => bad(field, "port 0 is no port"),
        Ok(address) => Ok(address),
        Err(error) => bad(field, format!("{error}")),
    }
}

/// The volume that an attach asks for.
///
/// # Errors
/// The first field outside its limits. Names in addresses are resolved, which may block.
pub fn attach(request: &api::AttachRequest) -> Result<VolumeSpec, SpecError> {
    let Ok(key) = <[u8; KEY_BYTES]>::try_from(request.key.as_slice()) else {
        return bad(
            "key",
            format!("has {} bytes, not {KEY_BYTES}", request.key.len()),
        );
    };
    let ack = match node_api::Ack::try_from(request.ack) {
        Ok(node_api::Ack::Majority) => Ack::Majority,
        Ok(node_api::Ack::All) => Ack::All,
        _ => return bad("ack", "must be ACK_MAJORITY or ACK_ALL"),
    };
    // Before anything is resolved.
    if request.members.len() > MEMBERS_MAX {
        return bad(
            "members",
            format!("a volume has at most {MEMBERS_MAX} members"),
        );
    }
    let spec = VolumeSpec {
        id: volume_id(&request.volume_id)?,
        name: request.name.clone(),
        size_bytes: request.size_bytes,
        access: VolumeAccess::ReadWrite,
        key: VolumeKey(key),
        ack,
        members: request
            .members
            .iter()
            .map(member)
            .collect::<Result<_, _>>()?,
        options: options(request.options.as_ref()),
    };
    spec.check()?;
    Ok(spec)
}

fn options(options: Option<&api::VolumeOptions>) -> VolumeOptions {
    let Some(options) = options else {
        return VolumeOptions::default();
    };
    let given = |number: u64| (number > 0).then_some(number);
    VolumeOptions {
        min_in_sync: given(options.min_in_sync.into()).map(|min| min as usize),
        io_timeout: given(options.io_timeout_ms).map(Duration::from_millis),
        lag_writes_max: given(options.lag_writes_max),
        lag_bytes_max: given(options.lag_bytes_max),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> api::AttachRequest {
        let member = |n: u8| api::MemberAddress {
            member: Some(node_api::Member {
                device_id: uuid::Uuid::from_bytes([n; 16]).to_string(),
                nonce: n.into(),
                role: node_api::Role::Data.into(),
            }),
            data_address: format!("tcp:127.0.0.1:70{n}"),
        };
        api::AttachRequest {
            volume_id: "0e3b2a4c-2b5c-4f0e-9d57-0c5a5d8f1a11".into(),
            name: "data".into(),
            size_bytes: 1 << 30,
            key: vec![1; 32],
            members: vec![member(1), member(2), member(3)],
            ack: node_api::Ack::Majority.into(),
            options: None,
        }
    }

    fn refused(change: impl FnOnce(&mut api::AttachRequest)) -> SpecError {
        let mut request = request();
        change(&mut request);
        attach(&request).unwrap_err()
    }

    #[test]
    fn a_request_within_its_limits_becomes_a_volume() {
        let mut request = request();
        request.options = Some(api::VolumeOptions {
            min_in_sync: 3,
            io_timeout_ms: 1500,
            lag_writes_max: 0,
            lag_bytes_max: 0,
        });
        let spec = attach(&request).unwrap();
        assert_eq!(spec.id.to_string(), request.volume_id);
        assert_eq!(spec.options.min_in_sync, Some(3));
        assert_eq!(spec.options.io_timeout, Some(Duration::from_millis(1500)));
        assert_eq!(spec.options.lag_writes_max, None);
        assert_eq!(spec.members[2].address.to_string(), "tcp:127.0.0.1:703");
    }

    #[test]
    fn every_bad_field_is_named_in_the_error() {
        assert_eq!(refused(|r| r.volume_id = "x".into()).field, "volume_id");
        assert_eq!(
            refused(|r| r.volume_id = "x".repeat(1 << 20)).field,
            "volume_id"
        );
        let nil = uuid::Uuid::nil().to_string();
        assert_eq!(refused(|r| r.volume_id = nil).field, "volume_id");
        assert_eq!(refused(|r| r.key.pop().map_or((), drop)).field, "key");
        assert_eq!(refused(|r| r.ack = 0).field, "ack");
        assert_eq!(refused(|r| r.ack = 77).field, "ack");
        assert_eq!(refused(|r| r.size_bytes = 5).field, "size_bytes");
        assert_eq!(refused(|r| r.name = "../x".into()).field, "name");
        assert_eq!(refused(|r| r.members.clear()).field, "members");
        assert_eq!(
            refused(|r| r.members = vec![r.members[0].clone(); 8]).field,
            "members"
        );
        assert_eq!(
            refused(|r| r.members[0].member = None).field,
            "members.member"
        );
        assert_eq!(
            refused(|r| r.members[1] = r.members[0].clone()).field,
            "members"
        );
        for address in [
            "",
            "127.0.0.1:1",
            "tcp:127.0.0.1:0",
            "unix:",
            "tcp:1",
            &"x".repeat(999),
        ] {
            let error = refused(|r| r.members[0].data_address = address.into());
            assert_eq!(error.field, "members.data_address", "{address}");
        }
        let role = refused(|r| r.members[0].member.as_mut().unwrap().role = 9);
        assert_eq!(
            role.to_string(),
            "members.member.role: must be ROLE_DATA or ROLE_WITNESS"
        );
    }
}
