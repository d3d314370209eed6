//! The attach API.

use std::sync::Arc;
use std::time::Duration;

use ashlar_control_api::initiator as api;
use ashlar_control_api::initiator::initiator_server::Initiator;
use ashlar_control_api::storage_node as node_api;
use ashlar_engine::Address;
use ashlar_replication::configuration::Role;
use tonic::{Request, Response, Status};

use super::attachments::{Attachments, ThreadIndex};
use super::validate;
use crate::handle::{AttachError, Stopped};
use crate::spec::SpecError;
use crate::status::{AttachmentStatus, MemberStatus};

/// The service behind the attach API's socket.
pub struct Service {
    /// The volumes.
    pub attachments: Arc<Attachments>,
    /// Where each thread serves NBD.
    pub nbd: Vec<Vec<Address>>,
    /// How long an attach waits for a recovery quorum.
    pub attach_timeout: Duration,
    /// How long requests under way may take to finish.
    pub drain_timeout: Duration,
}

impl From<SpecError> for Status {
    fn from(error: SpecError) -> Status {
        Status::invalid_argument(error.to_string())
    }
}

impl From<Stopped> for Status {
    fn from(error: Stopped) -> Status {
        Status::internal(error.to_string())
    }
}

impl From<AttachError> for Status {
    fn from(error: AttachError) -> Status {
        let message = error.to_string();
        match error {
            AttachError::Spec(_) | AttachError::Shrinks { .. } => Status::invalid_argument(message),
            AttachError::Different | AttachError::NameTaken(_) => Status::already_exists(message),
            AttachError::TimedOut { .. } | AttachError::Detaching => Status::unavailable(message),
            AttachError::Fenced { .. } | AttachError::Over(_) => Status::aborted(message),
            AttachError::TooMany => Status::resource_exhausted(message),
            AttachError::Stopped => Status::internal(message),
        }
    }
}

#[tonic::async_trait]
impl Initiator for Service {
    async fn attach(
        &self,
        request: Request<api::AttachRequest>,
    ) -> Result<Response<api::AttachResponse>, Status> {
        let request = request.into_inner();
        // Names in addresses are resolved there, which may take its time.
        let spec = tokio::task::spawn_blocking(move || validate::attach(&request)).await;
        let spec = spec.map_err(|error| Status::internal(error.to_string()))??;
        let (id, name) = (spec.id, spec.name.clone());
        let attached = self.attachments.attach(spec, self.attach_timeout).await;
        let (thread, status) = attached.inspect_err(|error| {
            tracing::warn!(volume = %id, name, %error, "attach failed");
        })?;
        let attachment = Some(self.attachment(thread, status));
        Ok(Response::new(api::AttachResponse { attachment }))
    }

    async fn detach(
        &self,
        request: Request<api::DetachRequest>,
    ) -> Result<Response<api::DetachResponse>, Status> {
        let id = validate::volume_id(&request.into_inner().volume_id)?;
        self.attachments.detach(id, self.drain_timeout).await?;
        Ok(Response::new(api::DetachResponse {}))
    }

    async fn list(
        &self,
        _: Request<api::ListRequest>,
    ) -> Result<Response<api::ListResponse>, Status> {
        let list = self.attachments.list().await?.into_iter();
        let attachments = list
            .map(|(thread, status)| self.attachment(thread, status))
            .collect();
        Ok(Response::new(api::ListResponse { attachments }))
    }
}

impl Service {
    fn attachment(&self, thread: ThreadIndex, status: AttachmentStatus) -> api::Attachment {
        let addresses = self.nbd.get(thread.0).into_iter().flatten();
        api::Attachment {
            volume_id: status.id.to_string(),
            nbd_uris: addresses
                .map(|address| nbd_uri(address, &status.name))
                .collect(),
            name: status.name,
            state: status.state.name().into(),
            reason: status.reason,
            epoch: status.epoch.map_or(0, |epoch| epoch.0),
            size_bytes: status.size_bytes,
            members: status.members.into_iter().map(member).collect(),
        }
    }
}

fn member(status: MemberStatus) -> api::MemberStatus {
    let role = match status.member.role {
        Role::Data => node_api::Role::Data,
        Role::Witness => node_api::Role::Witness,
    };
    api::MemberStatus {
        member: Some(node_api::Member {
            device_id: status.member.id.device.to_string(),
            nonce: status.member.id.nonce,
            role: role.into(),
        }),
        data_address: status.address.to_string(),
        state: status.state.name().into(),
        lag_writes: status.lag_writes,
        resync_blocks_done: status.resync_blocks_done,
        resync_blocks_total: status.resync_blocks_total,
    }
}

/// The URI that NBD clients know an export by. Names of volumes need no escapes; paths may.
fn nbd_uri(address: &Address, name: &str) -> String {
    match address {
        Address::Tcp(address) => format!("nbd://{address}/{name}"),
        Address::Unix(path) => {
            let path = percent_encoded(&path.display().to_string());
            format!("nbd+unix:///{name}?socket={path}")
        }
    }
}

/// RFC 3986: what may not stand in a query as it is becomes %XX.
fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                encoded.push(byte.into());
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_name_the_socket_and_the_volume() {
        let unix = "unix:/tmp/a b/nbd&x.sock".parse().unwrap();
        let uri = nbd_uri(&unix, "data-1");
        assert_eq!(uri, "nbd+unix:///data-1?socket=/tmp/a%20b/nbd%26x.sock");
        let tcp = "tcp:[::1]:10809".parse().unwrap();
        assert_eq!(nbd_uri(&tcp, "v"), "nbd://[::1]:10809/v");
    }
}
