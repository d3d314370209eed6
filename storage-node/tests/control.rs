//! The control API over a unix socket, metrics and health over HTTP, of a node in a process of its own.

mod support;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use ashlar_control_api::storage_node::storage_node_client::StorageNodeClient;
use ashlar_control_api::storage_node::{self as api};
use support::client::Client;
use support::process::Process;
use support::{KEY, MIB, block, epoch, folder};
use tonic::transport::Channel;
use tonic::{Code, Status};

const VOLUME: &str = "11111111-1111-1111-1111-111111111111";

/// Runs an async test body to its end.
fn run(body: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(body);
}

fn create_request(device_id: &str) -> api::CreateReplicaRequest {
    api::CreateReplicaRequest {
        volume_id: VOLUME.to_owned(),
        device_id: device_id.to_owned(),
        size_bytes: 8 * MIB,
        role: api::Role::Data.into(),
        ack: api::Ack::Majority.into(),
        key: KEY.to_vec(),
        nonce: 5,
        members: vec![api::Member {
            device_id: device_id.to_owned(),
            nonce: 5,
            role: api::Role::Data.into(),
        }],
    }
}

async fn create(control: &mut StorageNodeClient<Channel>, device_id: &str) -> api::Replica {
    let response = control.create_replica(create_request(device_id)).await;
    response.unwrap().into_inner().replica.unwrap()
}

async fn list(control: &mut StorageNodeClient<Channel>, volume_id: &str) -> Vec<api::Replica> {
    let volume_id = volume_id.to_owned();
    let request = api::ListReplicasRequest { volume_id };
    let response = control.list_replicas(request).await;
    response.unwrap().into_inner().replicas
}

fn refused<T: std::fmt::Debug>(result: Result<T, Status>, code: Code, about: &str) {
    let status = result.expect_err("a refusal");
    assert_eq!(status.code(), code, "{status}");
    assert!(
        status.message().contains(about),
        "{:?} says nothing about {about}",
        status.message()
    );
}

fn uuid(text: &str) -> [u8; 16] {
    *uuid::Uuid::parse_str(text).unwrap().as_bytes()
}

/// Attaches to the replica that [`create`] makes, with handle 0.
fn attach(node: &Process, number: u32) -> Client {
    let mut client = Client::connect(&node.data[0]);
    client.greet();
    let member = ashlar_replication::values::MemberId {
        device: ashlar_replication::values::DeviceId(uuid(&node.device_ids[0])),
        nonce: 5,
    };
    let volume = ashlar_replication::values::VolumeId(uuid(VOLUME));
    client.attach(volume, member, epoch(number), 0);
    client
}

fn get(address: &str, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: node\r\nconnection: close\r\n\r\n"
    )
    .unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let status = response.split(' ').nth(1).unwrap().parse().unwrap();
    let body = response.split_once("\r\n\r\n").unwrap().1;
    (status, body.to_owned())
}

#[test]
fn a_replica_is_made_listed_grown_and_deleted() {
    let folder = folder();
    let node = Process::start(folder.path(), &[]);
    let device = node.device_ids[0].clone();
    run(async {
        let mut control = node.control().await;
        let made = create(&mut control, &device).await;
        assert_eq!((made.volume_id.as_str(), made.nonce), (VOLUME, 5));
        assert_eq!((made.size_bytes, made.allocated_bytes), (8 * MIB, 0));
        assert_eq!((made.state.as_str(), made.attached), ("complete", false));
        assert_eq!((made.members.len(), made.in_sync.len()), (1, 1));
        assert_eq!(made.configuration_generation, 1);
        // Again: the same. Different: refused.
        assert_eq!(create(&mut control, &device).await, made);
        let mut other = create_request(&device);
        other.nonce = 6;
        other.members[0].nonce = 6;
        let other = control.create_replica(other).await;
        refused(other, Code::AlreadyExists, "another replica");
        assert_eq!(list(&mut control, "").await, std::slice::from_ref(&made));
        assert_eq!(list(&mut control, VOLUME).await, [made]);
        let grow = |size_bytes| api::GrowReplicaRequest {
            volume_id: VOLUME.to_owned(),
            device_id: String::new(),
            size_bytes,
        };
        let grown = control.grow_replica(grow(16 * MIB)).await.unwrap();
        assert_eq!(grown.into_inner().replica.unwrap().size_bytes, 16 * MIB);
        let shrunk = control.grow_replica(grow(8 * MIB)).await;
        refused(shrunk, Code::InvalidArgument, "");
        let delete = |nonce| api::DeleteReplicaRequest {
            volume_id: VOLUME.to_owned(),
            device_id: device.clone(),
            nonce,
        };
        // Another life of the replica is gone already; this one stays.
        control.delete_replica(delete(4)).await.unwrap();
        assert_eq!(list(&mut control, "").await.len(), 1);
        control.delete_replica(delete(5)).await.unwrap();
        control.delete_replica(delete(5)).await.unwrap();
        assert_eq!(list(&mut control, "").await, []);
    });
}

#[test]
fn every_field_outside_its_limits_is_refused_by_name() {
    let folder = folder();
    let node = Process::start(folder.path(), &[]);
    let device = node.device_ids[0].clone();
    type Change = fn(&mut api::CreateReplicaRequest);
    let cases: [(&str, Change); 13] = [
        ("volume_id", |r| r.volume_id = "no uuid".to_owned()),
        ("volume_id", |r| r.volume_id.clear()),
        ("device_id", |r| r.device_id = "no uuid".to_owned()),
        ("size_bytes", |r| r.size_bytes = 0),
        ("size_bytes", |r| r.size_bytes = 4097),
        ("size_bytes", |r| r.size_bytes = u64::MAX - 4095),
        ("role", |r| r.role = 0),
        ("role", |r| r.role = 99),
        ("key", |r| r.key.truncate(31)),
        ("key", |r| r.key.clear()),
        ("members", |r| r.members = vec![r.members[0].clone(); 8]),
        ("members", |r| r.members[0].nonce = 99),
        ("members", |r| r.members[0].device_id = "x".to_owned()),
    ];
    run(async {
        let mut control = node.control().await;
        for (field, change) in cases {
            let mut request = create_request(&device);
            change(&mut request);
            let result = control.create_replica(request).await;
            refused(result, Code::InvalidArgument, field);
        }
        let mut unknown = create_request(&device);
        unknown.device_id = VOLUME.to_owned();
        let unknown = control.create_replica(unknown).await;
        refused(unknown, Code::NotFound, "device");
        // A witness cannot be the whole in-sync set.
        let mut witness = create_request(&device);
        witness.role = api::Role::Witness.into();
        witness.members[0].role = api::Role::Witness.into();
        let witness = control.create_replica(witness).await;
        refused(witness, Code::InvalidArgument, "members");
        let bad = |volume_id: &str| api::ListReplicasRequest {
            volume_id: volume_id.to_owned(),
        };
        let result = control.list_replicas(bad("x")).await;
        refused(result, Code::InvalidArgument, "volume_id");
        assert_eq!(list(&mut control, "").await, []);
    });
}

#[test]
fn questions_about_unknown_replicas_are_not_found() {
    let folder = folder();
    let node = Process::start(folder.path(), &[]);
    let device_id = node.device_ids[0].clone();
    run(async {
        let mut control = node.control().await;
        for device_id in [String::new(), device_id] {
            let volume_id = VOLUME.to_owned();
            let grow = api::GrowReplicaRequest {
                volume_id: volume_id.clone(),
                device_id: device_id.clone(),
                size_bytes: 8 * MIB,
            };
            let result = control.grow_replica(grow).await;
            refused(result, Code::NotFound, "replica");
            let evict = api::EvictReplicaRequest {
                volume_id: volume_id.clone(),
                device_id: device_id.clone(),
            };
            let result = control.evict_replica(evict).await;
            refused(result, Code::NotFound, "replica");
            let describe = api::DescribeBlocksRequest {
                volume_id,
                device_id,
                ..Default::default()
            };
            let result = control.describe_blocks(describe).await.map(|_| ());
            refused(result, Code::NotFound, "replica");
        }
    });
}

#[test]
fn status_and_queue_tell_what_the_node_does() {
    let folder = folder();
    let node = Process::start(folder.path(), &["--engine=portable"]);
    let device_id = node.device_ids[0].clone();
    run(async {
        let mut control = node.control().await;
        create(&mut control, &device_id).await;
        let mut client = attach(&node, 1);
        client.write(0, 1, 0, &block(1));
        client.send_frame(|out| ashlar_wire::encode::renew(out, 1));
        client.receive();
        let status = control.status(api::StatusRequest {}).await.unwrap();
        let status = status.into_inner();
        assert!(!status.node.is_empty() && !status.version.is_empty());
        let device = &status.devices[0];
        assert_eq!(device.device_id, device_id);
        assert_eq!(
            (device.state.as_str(), device.engine.as_str()),
            ("open", "portable")
        );
        assert_eq!((device.replicas, device.connections), (1, 1));
        assert_eq!(device.client_bytes_written, 4096);
        assert!(device.device_bytes_written >= 8192 && device.journal_used_bytes > 0);
        assert_eq!(device.extents_total - device.extents_free, 1);
        assert!(device.data_addresses[0].starts_with("unix:"));
        let replicas = list(&mut control, VOLUME).await;
        let replica = &replicas[0];
        assert!(replica.attached);
        assert_eq!(
            (
                replica.promised_epoch,
                replica.last_epoch,
                replica.last_sequence
            ),
            (1, 1, 1)
        );
        let queue = control.dump_queue(api::DumpQueueRequest::default()).await;
        let classes = queue.unwrap().into_inner().classes;
        let mut names: Vec<_> = classes.iter().map(|c| c.class.as_str()).collect();
        names.sort_unstable();
        let volume = format!("volume {VOLUME}");
        assert_eq!(names, ["home writes", "resync", "scrub", &volume]);
        assert!(classes.iter().all(|c| c.depth == 0));
    });
}

#[test]
fn an_evicted_replica_says_so_also_after_a_restart() {
    let folder = folder();
    let node = Process::start(folder.path(), &[]);
    let device_id = node.device_ids[0].clone();
    run(async {
        let mut control = node.control().await;
        create(&mut control, &device_id).await;
        let request = api::EvictReplicaRequest {
            volume_id: VOLUME.to_owned(),
            device_id: String::new(),
        };
        control.evict_replica(request).await.unwrap();
        assert_eq!(list(&mut control, "").await[0].state, "evicted");
    });
    node.kill();
    let node = Process::start(folder.path(), &[]);
    run(async {
        let mut control = node.control().await;
        assert_eq!(list(&mut control, "").await[0].state, "evicted");
        let request = api::ReadmitReplicaRequest {
            volume_id: VOLUME.to_owned(),
            device_id: String::new(),
        };
        control.readmit_replica(request).await.unwrap();
        assert_eq!(list(&mut control, "").await[0].state, "complete");
    });
}

#[test]
fn the_description_of_blocks_names_the_bad_ones() {
    let folder = folder();
    let node = Process::start(folder.path(), &[]);
    let device_id = node.device_ids[0].clone();
    let large: Vec<u8> = (0..64).flat_map(|n| block(n + 300)).collect();
    run(async {
        let mut control = node.control().await;
        create(&mut control, &device_id).await;
        let mut client = attach(&node, 1);
        // Large: written in place, where it can be damaged.
        client.write(0, 1, 256, &large);
        client.write(0, 2, 1000, &block(2));
        let extents = describe(&mut control).await;
        let numbers: Vec<_> = extents.iter().map(|e| e.extent).collect();
        assert_eq!(numbers, [1, 3]);
        assert_eq!(extents[0].positions[..64], [(1 << 40) | 1; 64]);
        assert_eq!(extents[0].positions[64..], [0; 192]);
        assert_eq!(extents[0].crcs[7], crc32c::crc32c(&block(307)));
        assert_eq!(extents[1].crcs[1000 - 768], crc32c::crc32c(&block(2)));
        assert!(extents.iter().all(|e| e.bad_blocks.is_empty()));
        damage(&folder.path().join("store/blocks"), &block(307));
        let extents = describe(&mut control).await;
        assert_eq!(extents[0].bad_blocks, [7]);
        assert_eq!(extents[0].positions[7], (1 << 40) | 1);
        assert_eq!(extents[0].crcs[8], crc32c::crc32c(&block(308)));
    });
}

async fn describe(control: &mut StorageNodeClient<Channel>) -> Vec<api::DescribeBlocksResponse> {
    let request = api::DescribeBlocksRequest {
        volume_id: VOLUME.to_owned(),
        verify_data: true,
        ..Default::default()
    };
    let mut stream = control.describe_blocks(request).await.unwrap().into_inner();
    let mut extents = Vec::new();
    while let Some(extent) = stream.message().await.unwrap() {
        extents.push(extent);
    }
    extents
}

/// Flips a bit of the one place in the file that holds the block.
fn damage(path: &std::path::Path, content: &[u8]) {
    use std::os::unix::fs::FileExt as _;
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut page = vec![0; 4096];
    let mut found = 0;
    for n in 0..file.metadata().unwrap().len() / 4096 {
        file.read_exact_at(&mut page, n * 4096).unwrap();
        if page == content {
            page[100] ^= 1;
            file.write_all_at(&page, n * 4096).unwrap();
            found += 1;
        }
    }
    assert_eq!(found, 1);
}

#[test]
fn metrics_and_health_are_served_over_http() {
    let folder = folder();
    let node = Process::start(folder.path(), &[]);
    let device_id = node.device_ids[0].clone();
    run(async {
        let mut control = node.control().await;
        create(&mut control, &device_id).await;
    });
    let mut client = attach(&node, 1);
    (1..=10).for_each(|n| client.write(0, n, n, &block(n)));
    assert_eq!(get(&node.metrics, "/healthz"), (200, "ok\n".to_owned()));
    let (status, ready) = get(&node.metrics, "/readyz");
    assert_eq!((status, ready), (200, format!("device {device_id} open\n")));
    let (status, text) = get(&node.metrics, "/metrics");
    assert_eq!(status, 200);
    let label = format!("{{device=\"{device_id}\"}}");
    for line in [
        format!("ashlar_device_writes_total{label} 10"),
        format!("ashlar_device_write_bytes_total{label} 40960"),
        format!("ashlar_device_connections_open{label} 1"),
        format!("ashlar_device_write_journal_seconds_count{label} 10"),
        "# TYPE ashlar_device_write_journal_seconds histogram".to_owned(),
    ] {
        assert!(text.lines().any(|l| l == line), "no {line:?} in {text}");
    }
    assert!(text.lines().filter(|l| l.starts_with("# HELP")).count() > 20);
    assert_eq!(get(&node.metrics, "/nothing").0, 404);
}

#[test]
fn the_control_socket_belongs_to_its_owner() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = folder();
    let _node = Process::start(folder.path(), &[]);
    let mode = std::fs::metadata(folder.path().join("control")).unwrap();
    assert_eq!(mode.permissions().mode() & 0o777, 0o600);
}
