//! A storage node from its options to its end.

use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use ashlar_control_api::storage_node::storage_node_server::StorageNodeServer;
use ashlar_engine::Address;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tonic::transport::Server;

use crate::http;
use crate::open::{self, Running};
use crate::options::{Args, NodeOptions};
use crate::service::{Device, Service};
use crate::shard::commands::Command;

/// Runs a storage node until SIGTERM or SIGINT.
///
/// # Errors
/// Whatever keeps it from serving.
pub fn run(args: Args) -> anyhow::Result<()> {
    let options = NodeOptions::try_from(args)?;
    if options.lock_memory {
        let flags = rustix::mm::MlockAllFlags::CURRENT | rustix::mm::MlockAllFlags::FUTURE;
        rustix::mm::mlockall(flags)
            .context("--lock-memory: the limit on locked memory is too low")?;
    }
    // Before any store is made: an address that is taken should leave nothing behind.
    let metrics = std::net::TcpListener::bind(options.metrics);
    let metrics = metrics.with_context(|| format!("--metrics {}", options.metrics))?;
    metrics.set_nonblocking(true)?;
    let id = *uuid::Uuid::new_v4().as_bytes();
    let shards = options
        .stores
        .iter()
        .map(|store| open::start(store, &options, id));
    let shards = shards.collect::<anyhow::Result<Vec<_>>>()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let served = runtime.block_on(serve(&options, metrics, &shards));
    for shard in &shards {
        shard.handle.send(Command::Stop);
    }
    for shard in shards {
        let ended = shard.thread.join();
        ended.map_err(|_| anyhow::anyhow!("the shard of {} panicked", shard.path))??;
    }
    served
}

async fn serve(
    options: &NodeOptions,
    metrics: std::net::TcpListener,
    shards: &[Running],
) -> anyhow::Result<()> {
    let devices: Arc<[Device]> = shards.iter().map(Device::from).collect();
    let node = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    let service = StorageNodeServer::new(Service {
        node,
        devices: Arc::clone(&devices),
    });
    let (stop, stopped) = watch::channel(false);
    let wait = || {
        let mut stopped = stopped.clone();
        async move {
            let _ = stopped.wait_for(|stop| *stop).await;
        }
    };
    let metrics = TcpListener::from_std(metrics)?;
    let metrics_address = metrics.local_addr()?;
    let server = Server::builder().add_service(service);
    let context = || format!("--control {}", options.control);
    let (control, control_address) = match &options.control {
        Address::Tcp(address) => {
            let listener = TcpListener::bind(address).await.with_context(context)?;
            let actual = listener.local_addr()?.to_string();
            let incoming = TcpListenerStream::new(listener);
            (
                tokio::spawn(server.serve_with_incoming_shutdown(incoming, wait())),
                actual,
            )
        }
        Address::Unix(path) => {
            let listener = unix_listener(path).with_context(context)?;
            let actual = format!("unix:{}", path.display());
            let incoming = UnixListenerStream::new(listener);
            (
                tokio::spawn(server.serve_with_incoming_shutdown(incoming, wait())),
                actual,
            )
        }
    };
    let router = http::router(devices);
    let http = axum::serve(metrics, router).with_graceful_shutdown(wait());
    let http = tokio::spawn(http.into_future());
    for shard in shards {
        let addresses: Vec<_> = shard.addresses.iter().map(ToString::to_string).collect();
        tracing::info!(store = shard.path, data = addresses.join(" "), "serving");
    }
    tracing::info!(control = %control_address, metrics = %metrics_address, "ready");
    if options.announce {
        announce(shards, &control_address, &metrics_address.to_string())?;
    }
    let (mut terminate, mut interrupt) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("stopping");
    let _ = stop.send(true);
    // Clients that keep a connection open must not keep the node from stopping.
    let grace = std::time::Duration::from_millis(500);
    let _ = tokio::time::timeout(grace, async { tokio::join!(control, http) }).await;
    Ok(())
}

/// Binds a unix socket that only its owner may use; a socket that a dead process left is replaced.
fn unix_listener(path: &Path) -> std::io::Result<UnixListener> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
    let is_abandoned = is_socket
        && std::os::unix::net::UnixStream::connect(path)
            .is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
    if is_abandoned {
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

fn announce(shards: &[Running], control: &str, metrics: &str) -> anyhow::Result<()> {
    let data: Vec<_> = shards
        .iter()
        .flat_map(|s| &s.addresses)
        .map(ToString::to_string)
        .collect();
    let devices: Vec<_> = shards.iter().map(|s| s.device.to_string()).collect();
    let line = serde_json::json!({
        "control": control,
        "metrics": metrics,
        "data": data,
        "device_ids": devices,
    });
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
