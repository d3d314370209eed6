//! The daemon as a process: its attach API, its metrics, its end.

mod support;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ashlar_control_api::initiator as api;
use ashlar_control_api::initiator::initiator_client::InitiatorClient;
use ashlar_control_api::storage_node as node_api;
use ashlar_initiator::spec::VolumeSpec;
use ashlar_replication::configuration::Role;
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use support::{Cluster, MIB, block_on};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

#[test]
#[ignore = "not a test: the storage node that the tests start"]
fn storage_node_process() {
    support::storage_node_process();
}

struct Daemon {
    child: Child,
    announced: serde_json::Value,
    folder: tempfile::TempDir,
}

fn command(folder: &std::path::Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ashlar-initiator"));
    command
        .arg(format!("--listen=unix:{}/attach.sock", folder.display()))
        .arg(format!("--nbd=unix:{}/nbd.sock", folder.display()))
        .args([
            "--metrics=127.0.0.1:0",
            "--threads=2",
            "--attach-timeout-ms=2000",
            "--announce",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    // SAFETY: one system call between fork and exec; nothing is allocated.
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
    }
    command
}

impl Daemon {
    fn start() -> Daemon {
        let folder = tempfile::tempdir().unwrap();
        // What a process that was killed has left behind.
        drop(std::os::unix::net::UnixListener::bind(
            folder.path().join("attach.sock"),
        ));
        let mut child = command(folder.path()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let announced = serde_json::from_str(&line).unwrap();
        Daemon {
            child,
            announced,
            folder,
        }
    }

    async fn client(&self) -> InitiatorClient<Channel> {
        let uri = self.announced["control"].as_str().unwrap().to_owned();
        InitiatorClient::new(Endpoint::from_shared(uri).unwrap().connect().await.unwrap())
    }

    fn attach(&self, request: api::AttachRequest) -> Result<api::Attachment, Status> {
        let response = block_on(async { self.client().await.attach(request).await });
        Ok(response?.into_inner().attachment.expect("an attachment"))
    }

    fn detach(&self, volume_id: &str) -> Result<(), Status> {
        let request = api::DetachRequest {
            volume_id: volume_id.into(),
        };
        block_on(async { self.client().await.detach(request).await }).map(|_| ())
    }

    fn list(&self) -> Vec<api::Attachment> {
        let list = block_on(async { self.client().await.list(api::ListRequest {}).await });
        list.unwrap().into_inner().attachments
    }

    fn get(&self, path: &str) -> String {
        let address = self.announced["metrics"].as_str().unwrap();
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn request(spec: &VolumeSpec) -> api::AttachRequest {
    let member = |m: &ashlar_initiator::spec::MemberSpec| api::MemberAddress {
        member: Some(node_api::Member {
            device_id: m.member.id.device.to_string(),
            nonce: m.member.id.nonce,
            role: match m.member.role {
                Role::Data => node_api::Role::Data.into(),
                Role::Witness => node_api::Role::Witness.into(),
            },
        }),
        data_address: m.address.to_string(),
    };
    api::AttachRequest {
        volume_id: spec.id.to_string(),
        name: spec.name.clone(),
        size_bytes: spec.size_bytes,
        key: spec.key.0.to_vec(),
        members: spec.members.iter().map(member).collect(),
        ack: node_api::Ack::Majority.into(),
        options: None,
    }
}

#[test]
fn volumes_are_attached_listed_and_detached_and_each_call_may_be_repeated() {
    let cluster = Cluster::start(3, None);
    let daemon = Daemon::start();
    let one = request(&cluster.create_volume("one", 16 * MIB, 0));
    let two = request(&cluster.create_volume("two", 16 * MIB, 0));
    let first = daemon.attach(one.clone()).unwrap();
    assert_eq!(
        (first.state.as_str(), first.epoch, first.reason.as_str()),
        ("open", 1, "")
    );
    assert!(
        first.members.iter().all(|m| m.state == "in-sync"),
        "{first:?}"
    );
    let socket = format!("{}/nbd.sock", daemon.folder.path().display());
    assert_eq!(first.nbd_uris, [format!("nbd+unix:///one?socket={socket}")]);
    // The second volume goes to the thread without one.
    let second = daemon.attach(two.clone()).unwrap();
    assert_eq!(
        second.nbd_uris,
        [format!("nbd+unix:///two?socket={socket}.1")]
    );
    assert_eq!(
        daemon.attach(one.clone()).unwrap().epoch,
        1,
        "attached once"
    );
    let names: Vec<_> = daemon.list().into_iter().map(|a| a.name).collect();
    assert_eq!(names, ["one", "two"]);
    daemon.detach(&one.volume_id).unwrap();
    daemon.detach(&one.volume_id).unwrap();
    assert_eq!(daemon.list().len(), 1);
    assert_eq!(daemon.attach(one).unwrap().epoch, 2);
}

#[test]
fn what_an_attach_must_not_ask_for_has_its_own_error() {
    let mut cluster = Cluster::start(3, None);
    let daemon = Daemon::start();
    let good = request(&cluster.create_volume("one", 16 * MIB, 0));
    let code = |change: &dyn Fn(&mut api::AttachRequest)| {
        let mut changed = good.clone();
        change(&mut changed);
        let status = daemon.attach(changed).unwrap_err();
        (status.code(), status.message().to_owned())
    };
    let (invalid, message) = code(&|r| r.size_bytes = 1);
    assert_eq!(invalid, Code::InvalidArgument);
    assert!(message.starts_with("size_bytes:"), "{message}");
    assert_eq!(
        code(&|r| r.key = vec![9; 32]).0,
        Code::Aborted,
        "a wrong key"
    );
    assert_eq!(
        code(&|r| r.size_bytes = 32 * MIB).0,
        Code::Aborted,
        "replicas too small"
    );
    assert!(
        daemon.list().is_empty(),
        "what never opened is not attached"
    );
    daemon.attach(good.clone()).unwrap();
    assert_eq!(code(&|r| r.key = vec![9; 32]).0, Code::AlreadyExists);
    let other = "11111111-2222-3333-4444-555555555555".to_owned();
    assert_eq!(
        code(&|r| r.volume_id = other.clone()).0,
        Code::AlreadyExists,
        "the name"
    );
    assert_eq!(
        code(&|r| r.size_bytes = 8 * MIB).0,
        Code::InvalidArgument,
        "shrinks"
    );
    assert_eq!(
        daemon.detach("x").unwrap_err().code(),
        Code::InvalidArgument
    );
    daemon.detach(&good.volume_id).unwrap();
    cluster.nodes[0].kill();
    cluster.nodes[1].kill();
    let (unavailable, message) = code(&|_| {});
    assert_eq!(unavailable, Code::Unavailable);
    assert!(message.contains(&good.members[0].data_address), "{message}");
    assert!(daemon.list().is_empty());
}

#[test]
fn metrics_and_health_are_served() {
    let cluster = Cluster::start(3, None);
    let daemon = Daemon::start();
    daemon
        .attach(request(&cluster.create_volume("one", 16 * MIB, 0)))
        .unwrap();
    let text = daemon.get("/metrics");
    for line in [
        "ashlar_initiator_volumes 1",
        "ashlar_volume_open{volume=\"one\"} 1",
        "ashlar_volume_epoch{volume=\"one\"} 1",
        "ashlar_nbd_connections_accepted_total{thread=\"0\"} 0",
        "ashlar_initiator_connections_up{thread=\"0\"} 3",
        "ashlar_initiator_request_seconds_count{thread=\"0\",operation=\"write\"} 0",
    ] {
        assert!(text.contains(&format!("{line}\n")), "no {line} in {text}");
    }
    assert!(daemon.get("/healthz").starts_with("HTTP/1.1 200"));
    assert!(daemon.get("/readyz").starts_with("HTTP/1.1 200"));
    assert!(daemon.get("/other").starts_with("HTTP/1.1 404"));
}

#[test]
fn it_ends_on_sigterm_and_lets_its_volumes_go() {
    let cluster = Cluster::start(3, None);
    let mut daemon = Daemon::start();
    let request = request(&cluster.create_volume("one", 16 * MIB, 0));
    daemon.attach(request.clone()).unwrap();
    let begin = Instant::now();
    kill_process(Pid::from_child(&daemon.child), Signal::TERM).unwrap();
    let status = daemon.child.wait().unwrap();
    assert!(status.success(), "{status}");
    assert!(
        begin.elapsed() < Duration::from_secs(3),
        "{:?}",
        begin.elapsed()
    );
    assert!(!daemon.folder.path().join("attach.sock").exists());
    // Nobody has to wait for a lease of a daemon that said goodbye.
    let next = Daemon::start();
    assert_eq!(next.attach(request).unwrap().epoch, 2);
}

#[test]
fn a_second_daemon_on_the_same_socket_is_refused() {
    let daemon = Daemon::start();
    let mut second = command(daemon.folder.path());
    let output = second.stderr(Stdio::piped()).output().unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        text.contains("in use") || text.contains("another process serves"),
        "{text}"
    );
    // The first one is not disturbed.
    assert!(daemon.list().is_empty());
}
