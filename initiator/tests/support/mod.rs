//! Real storage nodes as processes, to be killed and stopped, and a front end that a test drives.
#![allow(dead_code, reason = "each test binary uses its part of this module")]

pub mod client;

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ashlar_control_api::storage_node as api;
use ashlar_control_api::storage_node::storage_node_client::StorageNodeClient;
use ashlar_engine::EngineKind;
use ashlar_initiator::front_end::VolumeAccess;
use ashlar_initiator::spec::{MemberSpec, VolumeOptions, VolumeSpec};
use ashlar_replication::configuration::{Ack, Member, Role};
use ashlar_replication::values::{DeviceId, MemberId, VolumeId};
use ashlar_wire::proof::VolumeKey;
use clap::Parser as _;
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use tonic::transport::{Channel, Endpoint};

pub const MIB: u64 = 1 << 20;
pub const LEASE: Duration = Duration::from_secs(3);
const ARGUMENTS: &str = "ASHLAR_TEST_NODE_ARGUMENTS";

#[derive(clap::Parser)]
struct NodeCommand {
    #[command(flatten)]
    args: ashlar_storage_node::options::Args,
}

/// What the ignored test `storage_node_process` of each test binary calls: the test binary starts
/// itself with only that test to have a storage node in a process of its own.
pub fn storage_node_process() {
    let Ok(arguments) = std::env::var(ARGUMENTS) else {
        return;
    };
    let command = NodeCommand::parse_from(arguments.lines());
    ashlar_storage_node::run(command.args).expect("the node serves");
}

/// A storage node that can be killed and started again on the same store and sockets.
pub struct Node {
    folder: PathBuf,
    engine: Option<EngineKind>,
    socket: &'static str,
    child: Option<Child>,
    device: DeviceId,
}

impl Node {
    fn start(folder: PathBuf, engine: Option<EngineKind>) -> Node {
        std::fs::create_dir_all(folder.join("store")).unwrap();
        let mut node = Node {
            socket: "data",
            folder,
            engine,
            child: None,
            device: DeviceId::default(),
        };
        node.restart();
        node
    }

    fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.folder.display())
    }

    pub fn data(&self) -> String {
        format!("unix:{}", self.path(self.socket))
    }

    /// Starts again, at another address.
    pub fn move_to(&mut self, socket: &'static str) {
        self.socket = socket;
        self.restart();
    }

    pub fn restart(&mut self) {
        let engine = self.engine.map(|engine| format!("--engine={engine}"));
        let arguments = [
            "node".to_owned(),
            format!("--store={}", self.path("store")),
            "--format-size=400MiB".to_owned(),
            format!("--listen={}", self.data()),
            format!("--control=unix:{}", self.path("control")),
            "--metrics=127.0.0.1:0".to_owned(),
            "--announce".to_owned(),
        ];
        let arguments: Vec<_> = arguments.into_iter().chain(engine).collect();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([
                "--exact",
                "storage_node_process",
                "--ignored",
                "--nocapture",
            ])
            .env(ARGUMENTS, arguments.join("\n"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        // SAFETY: one system call between fork and exec; nothing is allocated.
        unsafe {
            command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
        }
        let mut child = command.spawn().expect("the test binary starts itself");
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let announced = lines
            .map_while(Result::ok)
            .find(|line| line.starts_with('{'));
        let announced: serde_json::Value =
            serde_json::from_str(&announced.expect("the node announces itself")).unwrap();
        let device = announced["device_ids"][0].as_str().unwrap();
        self.device = DeviceId(*uuid::Uuid::try_parse(device).unwrap().as_bytes());
        self.child = Some(child);
    }

    pub fn signal(&self, signal: Signal) {
        let id = self.child.as_ref().expect("a running node").id();
        kill_process(Pid::from_raw(id as i32).unwrap(), signal).unwrap();
    }

    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("a running node");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    async fn control(&self) -> StorageNodeClient<Channel> {
        let uri = format!("unix:{}", self.path("control"));
        let channel = Endpoint::from_shared(uri).unwrap().connect().await.unwrap();
        StorageNodeClient::new(channel)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Nodes below a folder in memory.
pub struct Cluster {
    pub nodes: Vec<Node>,
    _folder: tempfile::TempDir,
}

pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.unwrap().block_on(future)
}

impl Cluster {
    pub fn start(nodes: usize, engine: Option<EngineKind>) -> Cluster {
        let shm = std::path::Path::new("/dev/shm");
        let parent = if shm.is_dir() {
            shm.to_owned()
        } else {
            std::env::temp_dir()
        };
        let folder = tempfile::Builder::new()
            .prefix("ashlar-")
            .tempdir_in(parent)
            .unwrap();
        let node = |n| Node::start(folder.path().join(format!("node-{n}")), engine);
        Cluster {
            nodes: (0..nodes).map(node).collect(),
            _folder: folder,
        }
    }

    /// Makes a volume with a replica on every node; on the last `witnesses` ones a witness.
    pub fn create_volume(&self, name: &str, size_bytes: u64, witnesses: usize) -> VolumeSpec {
        let id = VolumeId(*uuid::Uuid::new_v4().as_bytes());
        let key = VolumeKey([name.len() as u8; 32]);
        let data = self.nodes.len() - witnesses;
        let member = |(n, node): (usize, &Node)| MemberSpec {
            member: Member {
                id: MemberId {
                    device: node.device,
                    nonce: 100 + n as u64,
                },
                role: if n < data { Role::Data } else { Role::Witness },
            },
            address: node.data().parse().unwrap(),
        };
        let spec = VolumeSpec {
            id,
            name: name.into(),
            size_bytes,
            access: VolumeAccess::ReadWrite,
            key,
            ack: Ack::Majority,
            members: self.nodes.iter().enumerate().map(member).collect(),
            options: VolumeOptions::default(),
        };
        block_on(async {
            for (node, member) in self.nodes.iter().zip(&spec.members) {
                let request = create_request(&spec, &member.member);
                node.control().await.create_replica(request).await.unwrap();
            }
        });
        spec
    }

    /// Grows every replica.
    pub fn grow_volume(&self, spec: &VolumeSpec, size_bytes: u64) {
        block_on(async {
            for node in &self.nodes {
                let request = api::GrowReplicaRequest {
                    volume_id: spec.id.to_string(),
                    device_id: node.device.to_string(),
                    size_bytes,
                };
                node.control().await.grow_replica(request).await.unwrap();
            }
        });
    }

    /// Positions and checksums of all extents on every node; bad blocks fail.
    fn contents(&self, spec: &VolumeSpec) -> Vec<Vec<api::DescribeBlocksResponse>> {
        block_on(async {
            let mut all = Vec::new();
            for node in &self.nodes {
                let request = api::DescribeBlocksRequest {
                    volume_id: spec.id.to_string(),
                    device_id: node.device.to_string(),
                    first_extent: 0,
                    extent_count: 0,
                    verify_data: true,
                };
                let mut control = node.control().await;
                let mut stream = control.describe_blocks(request).await.unwrap().into_inner();
                let mut extents = Vec::new();
                while let Some(extent) = stream.message().await.unwrap() {
                    assert!(extent.bad_blocks.is_empty(), "{extent:?}");
                    extents.push(extent);
                }
                all.push(extents);
            }
            all
        })
    }

    /// Waits until all replicas hold the same blocks, which they do soon after the last write.
    pub fn assert_replicas_equal(&self, spec: &VolumeSpec) {
        let begin = Instant::now();
        loop {
            let contents = self.contents(spec);
            if contents.windows(2).all(|pair| pair[0] == pair[1]) {
                assert!(!contents[0].is_empty(), "nothing was compared");
                return;
            }
            assert!(
                begin.elapsed() < Duration::from_secs(20),
                "the replicas differ"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn create_request(spec: &VolumeSpec, member: &Member) -> api::CreateReplicaRequest {
    let role = |role| match role {
        Role::Data => api::Role::Data,
        Role::Witness => api::Role::Witness,
    };
    let to_api = |member: &Member| api::Member {
        device_id: member.id.device.to_string(),
        nonce: member.id.nonce,
        role: role(member.role).into(),
    };
    let mut members: Vec<_> = spec.members.iter().map(|m| m.member).collect();
    members.sort();
    api::CreateReplicaRequest {
        volume_id: spec.id.to_string(),
        device_id: member.id.device.to_string(),
        size_bytes: spec.size_bytes,
        role: role(member.role).into(),
        ack: api::Ack::Majority.into(),
        key: spec.key.0.to_vec(),
        nonce: member.id.nonce,
        members: members.iter().map(to_api).collect(),
    }
}
