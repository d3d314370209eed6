//! A shard in this process, set as a test wants it, and raw clients of it.
#![allow(dead_code, reason = "each test binary uses its part of this module")]

pub mod client;
pub mod process;
pub mod requests;

use std::path::Path;

use ashlar_engine::{Address, EngineKind};
use ashlar_replication::configuration::{
    Ack, Configuration, Generation, Member, MemberState, ReplicaState, Role,
};
use ashlar_replication::values::{
    DeviceId, Epoch, EpochNumber, MemberId, Pass, Position, VolumeId,
};
use ashlar_storage_node::metrics::ShardMetrics;
use ashlar_storage_node::open::{self, Running};
use ashlar_storage_node::options::{NodeOptions, StoreOptions};
use ashlar_storage_node::shard::ShardSettings;
use ashlar_storage_node::shard::commands::{Answer, Command, CommandError};
use ashlar_store::ReplicaSpec;
use client::Client;
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;
pub const KEY: [u8; 32] = [7; 32];
pub const BOTH: [EngineKind; 2] = [EngineKind::IoUring, EngineKind::Portable];

/// A volume by a small number.
pub fn volume(n: u8) -> VolumeId {
    VolumeId([n; 16])
}

/// A folder in memory where there is one: most tests are not about a disk.
pub fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        tempfile::tempdir_in(memory).unwrap()
    } else {
        tempfile::tempdir().unwrap()
    }
}

/// A shard on a thread of this process.
pub struct Shard {
    running: Option<Running>,
    pub device: DeviceId,
    pub address: Address,
    pub folder: TempDir,
}

impl Shard {
    pub fn start(kind: EngineKind) -> Shard {
        Shard::start_with(kind, ShardSettings::default(), folder())
    }

    /// One for many cases of a property test, with a replica of volume 1.
    pub fn shared() -> &'static Shard {
        static SHARD: std::sync::OnceLock<Shard> = std::sync::OnceLock::new();
        SHARD.get_or_init(|| {
            let shard = Shard::start(EngineKind::IoUring);
            shard.create(volume(1), 512);
            shard
        })
    }

    pub fn start_with(kind: EngineKind, settings: ShardSettings, folder: TempDir) -> Shard {
        let store = StoreOptions {
            directory: folder.path().join("store"),
            journal: None,
            format_bytes: Some(96 * MIB),
            journal_bytes: Some(16 * MIB),
            listen: vec![Address::Unix(folder.path().join("data"))],
            cpu: None,
        };
        std::fs::create_dir_all(&store.directory).unwrap();
        let node = NodeOptions {
            stores: vec![store.clone()],
            control: Address::Unix(folder.path().join("control")),
            metrics: "127.0.0.1:0".parse().unwrap(),
            engine: Some(kind),
            busy_poll: std::time::Duration::ZERO,
            shard: settings,
            lock_memory: false,
            announce: false,
        };
        let running = open::start(&store, &node, [9; 16]).expect("the shard starts");
        Shard {
            device: running.device,
            address: running.addresses[0].clone(),
            running: Some(running),
            folder,
        }
    }

    /// Stops it and starts another on the same store.
    pub fn restart(mut self, kind: EngineKind) -> Shard {
        self.stop();
        let folder = std::mem::replace(&mut self.folder, folder());
        Shard::start_with(kind, ShardSettings::default(), folder)
    }

    pub fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.handle.send(Command::Stop);
            let ended = running.thread.join().expect("the shard does not panic");
            ended.expect("the shard ends well");
        }
    }

    pub fn ask<T: Send + 'static>(
        &self,
        command: impl FnOnce(Answer<T>) -> Command,
    ) -> Result<T, CommandError> {
        let running = self.running.as_ref().expect("a running shard");
        let (sender, receiver) = tokio::sync::oneshot::channel();
        running.handle.send(command(sender));
        receiver.blocking_recv().expect("the shard answers")
    }

    pub fn metrics(&self) -> ShardMetrics {
        self.ask(Command::Metrics).unwrap()
    }

    pub fn gauge(&self, name: &str) -> f64 {
        let metrics = self.metrics();
        let found = metrics.gauges.iter().find(|(n, _, _)| *n == name);
        found.expect("a known gauge").2
    }

    /// The member that [`Shard::create`] makes.
    pub fn member(&self, volume: VolumeId) -> MemberId {
        MemberId {
            device: self.device,
            nonce: u64::from(volume.0[0]),
        }
    }

    /// Makes a replica, the only member of its volume.
    pub fn create(&self, volume: VolumeId, size_blocks: u64) -> MemberId {
        let id = self.member(volume);
        let spec = spec(id, volume, size_blocks);
        self.ask(|answer| Command::Create(Box::new(spec), answer))
            .expect("a new replica");
        id
    }

    /// A client that has shaken hands.
    pub fn client(&self) -> Client {
        let mut client = Client::connect(&self.address);
        client.greet();
        client
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.stop();
        }
    }
}

/// The first configuration of a volume with one member.
pub fn configuration(id: MemberId, epoch: u32, generation: u64) -> Configuration {
    Configuration {
        epoch: EpochNumber(epoch),
        generation: Generation(generation),
        ack: Ack::Majority,
        members: vec![Member {
            id,
            role: Role::Data,
        }],
        previous: Vec::new(),
        in_sync: vec![id],
    }
}

pub fn spec(id: MemberId, volume: VolumeId, size_blocks: u64) -> ReplicaSpec {
    ReplicaSpec {
        volume,
        state: MemberState {
            id,
            role: Role::Data,
            promised: Epoch::default(),
            configuration: Some(configuration(id, 0, 1)),
            state: ReplicaState::Complete,
            last_pass: (EpochNumber(0), Pass(0)),
            last: Position::ZERO,
        },
        size_blocks,
        key: KEY,
        ack: Ack::Majority,
    }
}

pub fn epoch(number: u32) -> Epoch {
    Epoch {
        number: EpochNumber(number),
        nonce: 1000 + u64::from(number),
    }
}

/// A block of some content.
pub fn block(n: u64) -> Vec<u8> {
    (0..4096u64)
        .map(|i| (n.wrapping_mul(131) ^ (i / 9)) as u8)
        .collect()
}
