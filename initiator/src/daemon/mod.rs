//! The daemon: threads that own volumes, the attach API on a unix socket, metrics over HTTP.

mod args;
mod attachments;
mod families;
mod http;
mod service;
mod validate;

pub use args::Args;
pub use validate::attach as volume_spec;

use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context as _;
use ashlar_control_api::initiator::initiator_server::InitiatorServer;
use ashlar_engine::Address;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

use self::attachments::Attachments;
use self::service::Service;
use crate::nbd::{NbdCounters, NbdServer};
use crate::random;
use crate::thread::{FrontEndMaker, InitiatorThread, SpawnedThread, ThreadOptions};

/// The longest that the end of the process waits for requests under way: who sent SIGTERM sends SIGKILL next.
const STOP_DRAIN: Duration = Duration::from_secs(2);
/// Clients of the attach API that keep a connection open must not keep the daemon from ending.
const STOP_GRACE: Duration = Duration::from_millis(500);
/// Requests to the attach API are small.
const REQUEST_BYTES_MAX: usize = 64 << 10;

/// Runs an initiator until SIGTERM or SIGINT.
///
/// # Errors
/// Whatever keeps it from serving.
pub fn run(args: Args) -> anyhow::Result<()> {
    args.check().map_err(anyhow::Error::msg)?;
    let identity = random::bytes();
    let mut threads = Vec::new();
    let mut nbd = Vec::new();
    for index in 0..args.threads {
        let (thread, served) = start_thread(&args, index, identity)?;
        threads.push(thread);
        nbd.push(served);
    }
    let handles = threads
        .iter()
        .map(|thread| thread.handle().clone())
        .collect();
    let attachments = Arc::new(Attachments::new(handles));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let served = runtime.block_on(serve(&args, nbd, Arc::clone(&attachments)));
    attachments.stop(args.drain_timeout().min(STOP_DRAIN));
    for thread in threads {
        thread.join().context("an initiator thread failed")?;
    }
    served
}

/// The NBD server of a thread.
#[derive(Clone, Default)]
struct Nbd {
    addresses: Vec<Address>,
    counters: Arc<NbdCounters>,
}

/// Starts a thread with its NBD server.
fn start_thread(
    args: &Args,
    index: u16,
    identity: [u8; 16],
) -> anyhow::Result<(SpawnedThread, Nbd)> {
    let options = ThreadOptions {
        name: format!("initiator-{index}"),
        cpu: args.cpu.get(usize::from(index)).copied(),
        engine: ashlar_engine::Options {
            kind: args.engine,
            busy_poll: Duration::from_micros(args.busy_poll_us),
            ..ashlar_engine::Options::default()
        },
        lease: Duration::from_millis(args.lease_ms),
        identity,
    };
    let addresses = args
        .nbd
        .iter()
        .map(|address| args::nbd_address(address, index));
    let addresses = addresses
        .collect::<Result<Vec<_>, _>>()
        .map_err(anyhow::Error::msg)?;
    let actual = Arc::new(Mutex::new(Vec::new()));
    let counters = Arc::new(Mutex::new(Arc::default()));
    let (known, counted) = (Arc::clone(&actual), Arc::clone(&counters));
    let nbd: FrontEndMaker = Box::new(move || {
        let server = NbdServer::new(addresses, known);
        if let Ok(mut counters) = counted.lock() {
            *counters = server.counters();
        }
        Box::new(server)
    });
    // Front ends have been made and started when it returns.
    let thread = InitiatorThread::spawn(options, vec![nbd])?;
    let nbd = Nbd {
        addresses: actual.lock().map(|all| all.clone()).unwrap_or_default(),
        counters: counters
            .lock()
            .map(|all| Arc::clone(&all))
            .unwrap_or_default(),
    };
    Ok((thread, nbd))
}

async fn serve(args: &Args, nbd: Vec<Nbd>, attachments: Arc<Attachments>) -> anyhow::Result<()> {
    let (stop, stopped) = watch::channel(false);
    let wait = || {
        let mut stopped = stopped.clone();
        async move {
            // A sender that is gone means the same.
            let _ = stopped.wait_for(|stop| *stop).await;
        }
    };
    let path = &args.listen;
    let listener = unix_listener(path).with_context(|| format!("--listen {}", path.display()))?;
    let service = InitiatorServer::new(Service {
        attachments: Arc::clone(&attachments),
        nbd: nbd.iter().map(|nbd| nbd.addresses.clone()).collect(),
        attach_timeout: args.attach_timeout(),
        drain_timeout: args.drain_timeout(),
    });
    let service = service.max_decoding_message_size(REQUEST_BYTES_MAX);
    let incoming = UnixListenerStream::new(listener);
    let server = Server::builder().add_service(service);
    let api = tokio::spawn(server.serve_with_incoming_shutdown(incoming, wait()));
    let mut http = tokio::spawn(std::future::ready(Ok(())));
    let mut metrics = None;
    if let Some(address) = args.metrics {
        let listener = TcpListener::bind(address).await;
        let listener = listener.with_context(|| format!("--metrics {address}"))?;
        metrics = Some(listener.local_addr()?);
        let router = http::router(http::Shared {
            attachments: Arc::clone(&attachments),
            nbd: nbd.iter().map(|nbd| Arc::clone(&nbd.counters)).collect(),
        });
        let server = axum::serve(listener, router).with_graceful_shutdown(wait());
        http = tokio::spawn(server.into_future());
    }
    if args.announce {
        announce(path, metrics, nbd.iter().flat_map(|nbd| &nbd.addresses))?;
    }
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = ended(&attachments) => tracing::error!("an initiator thread has ended"),
    }
    let _ = stop.send(true);
    let _ = tokio::time::timeout(STOP_GRACE, async { tokio::join!(api, http) }).await;
    // The next start would take it for one that is still served.
    let _ = std::fs::remove_file(path);
    Ok(())
}

/// Ends when a thread has ended, which it does by itself only after an error.
async fn ended(attachments: &Attachments) {
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    loop {
        ticks.tick().await;
        if attachments.is_any_stopped() {
            return;
        }
    }
}

/// Binds a unix socket that only its owner may use, because keys pass through it. A socket that a
/// dead process left is replaced.
fn unix_listener(path: &Path) -> anyhow::Result<UnixListener> {
    anyhow::ensure!(
        std::os::unix::net::UnixStream::connect(path).is_err(),
        "another process serves there"
    );
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    if let Some(folder) = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
    {
        std::fs::create_dir_all(folder)?;
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

fn announce<'a>(
    control: &Path,
    metrics: Option<SocketAddr>,
    nbd: impl Iterator<Item = &'a Address>,
) -> anyhow::Result<()> {
    let line = serde_json::json!({
        "control": format!("unix:{}", control.display()),
        "metrics": metrics.map(|address| address.to_string()),
        "nbd": nbd.map(ToString::to_string).collect::<Vec<_>>(),
    });
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
