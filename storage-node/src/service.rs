//! The control API (crates/control-api/proto/storage_node.proto): checks every field, then asks the
//! shard by its mailbox.

use std::pin::Pin;
use std::sync::Arc;

use ashlar_control_api::storage_node::storage_node_server::StorageNode;
use ashlar_control_api::storage_node::{self as api};
use ashlar_replication::configuration::{
    Ack, Configuration, Generation, Member, MemberState, ReplicaState, Role,
};
use ashlar_replication::values::{
    BLOCK_BYTES, DeviceId, EXTENT_BLOCKS, EXTENT_BYTES, Epoch, EpochNumber, ExtentIndex,
    MEMBERS_MAX, MemberId, Pass, Position, VolumeId,
};
use ashlar_store::{ReplicaSpec, StoreError};
use tokio::sync::oneshot;
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use crate::open::Running;
use crate::shard::ShardHandle;
use crate::shard::commands::{Answer, Command, CommandError, ExtentInfo, ReplicaInfo};

/// The largest volume: what a 2⁴⁰-byte extent table of a device could still index.
const SIZE_BYTES_MAX: u64 = 1 << 50;
/// Extents asked of a shard at a time.
const EXTENTS_AT_ONCE: u32 = 4096;

/// A device of the node.
#[derive(Clone)]
pub struct Device {
    /// Its identity.
    pub id: DeviceId,
    /// Where its store lies.
    pub path: String,
    /// Where its shard listens.
    pub addresses: Vec<String>,
    /// Its shard's mailbox.
    pub shard: ShardHandle,
}

impl From<&Running> for Device {
    fn from(running: &Running) -> Device {
        Device {
            id: running.device,
            path: running.path.clone(),
            addresses: running.addresses.iter().map(ToString::to_string).collect(),
            shard: running.handle.clone(),
        }
    }
}

/// Asks a shard and waits for its answer.
///
/// # Errors
/// What the shard answers, or that it has stopped.
pub async fn ask<T>(
    shard: &ShardHandle,
    command: impl FnOnce(Answer<T>) -> Command,
) -> Result<T, CommandError> {
    let (sender, receiver) = oneshot::channel();
    shard.send(command(sender));
    receiver.await.unwrap_or(Err(CommandError::Stopped))
}

fn status_of(error: CommandError) -> Status {
    let text = error.to_string();
    match error {
        CommandError::NotFound | CommandError::Store(StoreError::UnknownReplica) => {
            Status::not_found(text)
        }
        CommandError::Exists(_) | CommandError::Store(StoreError::AlreadyExists) => {
            Status::already_exists(text)
        }
        CommandError::Store(StoreError::DeviceFull | StoreError::ReplicasFull) => {
            Status::resource_exhausted(text)
        }
        CommandError::Store(StoreError::BadRange) => Status::invalid_argument(text),
        CommandError::Store(_) => Status::failed_precondition(text),
        CommandError::Stopped => Status::unavailable(text),
    }
}

fn invalid(field: &str, why: impl std::fmt::Display) -> Status {
    Status::invalid_argument(format!("{field}: {why}"))
}

fn uuid(field: &str, text: &str) -> Result<[u8; 16], Status> {
    let uuid = uuid::Uuid::parse_str(text);
    uuid.map(|uuid| *uuid.as_bytes())
        .map_err(|_| invalid(field, format!("{text:?} is no UUID")))
}

fn volume_id(text: &str) -> Result<VolumeId, Status> {
    uuid("volume_id", text).map(VolumeId)
}

fn blocks(size_bytes: u64) -> Result<u64, Status> {
    let block = BLOCK_BYTES as u64;
    if size_bytes == 0 || size_bytes > SIZE_BYTES_MAX || !size_bytes.is_multiple_of(block) {
        let limits = format!("a multiple of {block}, at most {SIZE_BYTES_MAX}, is needed");
        return Err(invalid("size_bytes", limits));
    }
    Ok(size_bytes / block)
}

fn member(field: &str, member: &api::Member) -> Result<Member, Status> {
    let role = match member.role() {
        api::Role::Data => Role::Data,
        api::Role::Witness => Role::Witness,
        api::Role::Unspecified => return Err(invalid(field, "a member without a role")),
    };
    let device = DeviceId(uuid(field, &member.device_id)?);
    Ok(Member {
        id: MemberId {
            device,
            nonce: member.nonce,
        },
        role,
    })
}

fn to_api(member: Member) -> api::Member {
    let role = match member.role {
        Role::Data => api::Role::Data,
        Role::Witness => api::Role::Witness,
    };
    let device_id = member.id.device.to_string();
    api::Member {
        device_id,
        nonce: member.id.nonce,
        role: role.into(),
    }
}

fn replica(info: ReplicaInfo) -> api::Replica {
    let configuration = info.state.configuration.as_ref();
    let members = configuration
        .map(|c| c.members.as_slice())
        .unwrap_or_default();
    let in_sync = members
        .iter()
        .filter(|m| configuration.is_some_and(|c| c.in_sync.contains(&m.id)));
    let role = to_api(Member {
        id: info.state.id,
        role: info.state.role,
    })
    .role;
    api::Replica {
        volume_id: info.volume.to_string(),
        device_id: info.state.id.device.to_string(),
        nonce: info.state.id.nonce,
        role,
        size_bytes: info.size_blocks * BLOCK_BYTES as u64,
        allocated_bytes: info.allocated_extents * EXTENT_BYTES,
        promised_epoch: info.state.promised.number.0,
        last_epoch: info.state.last.epoch.0,
        last_sequence: info.state.last.sequence.0,
        state: match (info.evicted, info.state.state) {
            (true, _) => "evicted",
            (false, ReplicaState::Complete) => "complete",
            (false, ReplicaState::Resyncing { .. }) => "resyncing",
        }
        .to_owned(),
        configuration_epoch: configuration.map_or(0, |c| c.epoch.0),
        configuration_generation: configuration.map_or(0, |c| c.generation.0),
        members: members.iter().copied().map(to_api).collect(),
        in_sync: in_sync.copied().map(to_api).collect(),
        attached: info.attached,
    }
}

/// The control API of a node.
pub struct Service {
    /// Name of the node, as shown in its status.
    pub node: String,
    /// Its devices.
    pub devices: Arc<[Device]>,
}

impl Service {
    fn device(&self, text: &str) -> Result<&Device, Status> {
        let id = DeviceId(uuid("device_id", text)?);
        let found = self.devices.iter().find(|device| device.id == id);
        found.ok_or_else(|| Status::not_found(format!("this node has no device {id}")))
    }

    /// The device of that id, or of the volume's replica where no id is given.
    async fn device_with(&self, text: &str, volume: VolumeId) -> Result<&Device, Status> {
        if !text.is_empty() {
            return self.device(text);
        }
        for device in self.devices.iter() {
            let list = ask(&device.shard, |answer| Command::List(Some(volume), answer)).await;
            if !list.map_err(status_of)?.is_empty() {
                return Ok(device);
            }
        }
        Err(Status::not_found(format!(
            "no device of this node has a replica of {volume}"
        )))
    }

    /// The device with the most free extents.
    async fn roomiest(&self) -> Result<&Device, Status> {
        let mut best: Option<(u64, &Device)> = None;
        for device in self.devices.iter() {
            let info = ask(&device.shard, Command::Device)
                .await
                .map_err(status_of)?;
            let free = info.usage.extents_free;
            if !info.closed && best.is_none_or(|(most, _)| free > most) {
                best = Some((free, device));
            }
        }
        let none = || Status::failed_precondition("every device of this node is closed");
        best.map(|(_, device)| device).ok_or_else(none)
    }
}

fn spec_of(request: &api::CreateReplicaRequest, device: DeviceId) -> Result<ReplicaSpec, Status> {
    let role = member(
        "role",
        &api::Member {
            device_id: device.to_string(),
            nonce: request.nonce,
            role: request.role,
        },
    )?;
    let key = <[u8; 32]>::try_from(request.key.as_slice());
    let key = key.map_err(|_| invalid("key", "32 bytes are needed"))?;
    let ack = match request.ack() {
        api::Ack::Majority | api::Ack::Unspecified => Ack::Majority,
        api::Ack::All => Ack::All,
    };
    if request.members.len() > MEMBERS_MAX {
        return Err(invalid("members", format!("at most {MEMBERS_MAX}")));
    }
    let members = request.members.iter().map(|m| member("members", m));
    let mut members = members.collect::<Result<Vec<_>, _>>()?;
    members.sort();
    let configuration = if members.is_empty() {
        None
    } else {
        if !members.contains(&role) {
            return Err(invalid("members", "the replica itself is not among them"));
        }
        let data = members.iter().filter(|m| m.role == Role::Data);
        let configuration = Configuration {
            epoch: EpochNumber(0),
            generation: Generation(1),
            ack,
            in_sync: data.map(|m| m.id).collect(),
            members,
            previous: Vec::new(),
        };
        configuration
            .check()
            .map_err(|error| invalid("members", error))?;
        Some(configuration)
    };
    let state = MemberState {
        id: role.id,
        role: role.role,
        promised: Epoch::default(),
        configuration,
        state: ReplicaState::Complete,
        last_pass: (EpochNumber(0), Pass(0)),
        last: Position::ZERO,
    };
    let volume = volume_id(&request.volume_id)?;
    Ok(ReplicaSpec {
        volume,
        state,
        size_blocks: blocks(request.size_bytes)?,
        key,
        ack,
    })
}

fn describe_response(info: ExtentInfo) -> api::DescribeBlocksResponse {
    api::DescribeBlocksResponse {
        extent: info.extent.0,
        positions: info.positions,
        crcs: info.crcs,
        bad_blocks: info.bad_blocks,
    }
}

#[tonic::async_trait]
impl StorageNode for Service {
    async fn status(
        &self,
        _: Request<api::StatusRequest>,
    ) -> Result<Response<api::StatusResponse>, Status> {
        let mut devices = Vec::new();
        for device in self.devices.iter() {
            let info = ask(&device.shard, Command::Device)
                .await
                .map_err(status_of)?;
            devices.push(api::Device {
                device_id: device.id.to_string(),
                path: device.path.clone(),
                data_addresses: device.addresses.clone(),
                size_bytes: info.size_bytes,
                extents_total: info.usage.extents,
                extents_free: info.usage.extents_free,
                journal_bytes: info.usage.journal_bytes,
                journal_used_bytes: info.usage.journal_used_bytes,
                dirty_bytes: info.usage.dirty_bytes,
                state: if info.closed {
                    "closed after an error"
                } else {
                    "open"
                }
                .to_owned(),
                engine: info.engine,
                connections: info.connections,
                replicas: info.replicas,
                device_bytes_written: info.device_bytes_written,
                client_bytes_written: info.client_bytes_written,
            });
        }
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Ok(Response::new(api::StatusResponse {
            node: self.node.clone(),
            version,
            devices,
        }))
    }

    async fn create_replica(
        &self,
        request: Request<api::CreateReplicaRequest>,
    ) -> Result<Response<api::CreateReplicaResponse>, Status> {
        let request = request.into_inner();
        let device = if request.device_id.is_empty() {
            self.roomiest().await?
        } else {
            self.device(&request.device_id)?
        };
        let spec = Box::new(spec_of(&request, device.id)?);
        let info = ask(&device.shard, |answer| Command::Create(spec, answer)).await;
        let replica = Some(replica(info.map_err(status_of)?));
        Ok(Response::new(api::CreateReplicaResponse { replica }))
    }

    async fn list_replicas(
        &self,
        request: Request<api::ListReplicasRequest>,
    ) -> Result<Response<api::ListReplicasResponse>, Status> {
        let text = request.into_inner().volume_id;
        let volume = if text.is_empty() {
            None
        } else {
            Some(volume_id(&text)?)
        };
        let mut replicas = Vec::new();
        for device in self.devices.iter() {
            let list = ask(&device.shard, |answer| Command::List(volume, answer)).await;
            replicas.extend(list.map_err(status_of)?.into_iter().map(replica));
        }
        Ok(Response::new(api::ListReplicasResponse { replicas }))
    }

    async fn delete_replica(
        &self,
        request: Request<api::DeleteReplicaRequest>,
    ) -> Result<Response<api::DeleteReplicaResponse>, Status> {
        let request = request.into_inner();
        let volume = volume_id(&request.volume_id)?;
        let device = self.device(&request.device_id)?;
        let done = ask(&device.shard, |answer| {
            Command::Delete(volume, request.nonce, answer)
        })
        .await;
        done.map_err(status_of)?;
        Ok(Response::new(api::DeleteReplicaResponse {}))
    }

    async fn grow_replica(
        &self,
        request: Request<api::GrowReplicaRequest>,
    ) -> Result<Response<api::GrowReplicaResponse>, Status> {
        let request = request.into_inner();
        let volume = volume_id(&request.volume_id)?;
        let device = self.device_with(&request.device_id, volume).await?;
        let blocks = blocks(request.size_bytes)?;
        let info = ask(&device.shard, |answer| {
            Command::Grow(volume, blocks, answer)
        })
        .await;
        let replica = Some(replica(info.map_err(status_of)?));
        Ok(Response::new(api::GrowReplicaResponse { replica }))
    }

    async fn evict_replica(
        &self,
        request: Request<api::EvictReplicaRequest>,
    ) -> Result<Response<api::EvictReplicaResponse>, Status> {
        let request = request.into_inner();
        let volume = volume_id(&request.volume_id)?;
        let device = self.device_with(&request.device_id, volume).await?;
        let done = ask(&device.shard, |answer| {
            Command::SetEvicted(volume, true, answer)
        })
        .await;
        done.map_err(status_of)?;
        Ok(Response::new(api::EvictReplicaResponse {}))
    }

    async fn readmit_replica(
        &self,
        request: Request<api::ReadmitReplicaRequest>,
    ) -> Result<Response<api::ReadmitReplicaResponse>, Status> {
        let request = request.into_inner();
        let volume = volume_id(&request.volume_id)?;
        let device = self.device_with(&request.device_id, volume).await?;
        let done = ask(&device.shard, |answer| {
            Command::SetEvicted(volume, false, answer)
        })
        .await;
        done.map_err(status_of)?;
        Ok(Response::new(api::ReadmitReplicaResponse {}))
    }

    type DescribeBlocksStream =
        Pin<Box<dyn Stream<Item = Result<api::DescribeBlocksResponse, Status>> + Send>>;

    async fn describe_blocks(
        &self,
        request: Request<api::DescribeBlocksRequest>,
    ) -> Result<Response<Self::DescribeBlocksStream>, Status> {
        let request = request.into_inner();
        let volume = volume_id(&request.volume_id)?;
        let device = self.device_with(&request.device_id, volume).await?;
        let list = ask(&device.shard, |answer| Command::List(Some(volume), answer)).await;
        let list = list.map_err(status_of)?;
        let info = list
            .first()
            .ok_or_else(|| Status::not_found("no such replica"))?;
        let all = info.size_blocks.div_ceil(u64::from(EXTENT_BLOCKS));
        let end = match request.extent_count {
            0 => all,
            count => all.min(request.first_extent.saturating_add(count)),
        };
        let shard = device.shard.clone();
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        tokio::spawn(async move {
            if let Err(error) = describe(&shard, volume, request.first_extent..end, &sender).await {
                let _ = sender.send(Err(status_of(error))).await;
            }
        });
        let stream = tokio_stream::wrappers::ReceiverStream::new(receiver);
        Ok(Response::new(Box::pin(stream)))
    }

    async fn dump_queue(
        &self,
        request: Request<api::DumpQueueRequest>,
    ) -> Result<Response<api::DumpQueueResponse>, Status> {
        let text = request.into_inner().device_id;
        let chosen = if text.is_empty() {
            None
        } else {
            Some(self.device(&text)?.id)
        };
        let mut classes = Vec::new();
        for device in self
            .devices
            .iter()
            .filter(|d| chosen.is_none_or(|id| id == d.id))
        {
            let dumps = ask(&device.shard, Command::Queue)
                .await
                .map_err(status_of)?;
            classes.extend(dumps.into_iter().map(|(class, dump)| api::QueueClass {
                device_id: device.id.to_string(),
                class,
                depth: dump.depth as u64,
                queued_bytes: dump.queued.0,
                reservation: dump.shares.reservation,
                weight: dump.shares.weight,
                limit: dump.shares.limit,
                reservation_tag_ms: dump.reservation_tag * 1e3,
                weight_tag: dump.weight_tag,
                limit_tag_ms: dump.limit_tag * 1e3,
            }));
        }
        Ok(Response::new(api::DumpQueueResponse { classes }))
    }
}

/// Streams the extents of a range that hold anything.
async fn describe(
    shard: &ShardHandle,
    volume: VolumeId,
    extents: std::ops::Range<u64>,
    sender: &tokio::sync::mpsc::Sender<Result<api::DescribeBlocksResponse, Status>>,
) -> Result<(), CommandError> {
    let mut from = extents.start;
    while from < extents.end {
        let count = (extents.end - from).min(u64::from(EXTENTS_AT_ONCE)) as u32;
        let first = ExtentIndex(from);
        let held = ask(shard, |answer| {
            Command::Extents(volume, first, count, answer)
        })
        .await?;
        for extent in held {
            let info = ask(shard, |answer| Command::Describe(volume, extent, answer)).await?;
            if sender.send(Ok(describe_response(info))).await.is_err() {
                // The caller went away.
                return Ok(());
            }
        }
        from += u64::from(count);
    }
    Ok(())
}
