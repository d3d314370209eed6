//! The daemons as hidden commands of this executable: quickstart and bench start real processes of
//! them, with the very code of `ashlar-storage-node` and `ashlar-initiator`.

/// Arguments of `ashlar storage-node`.
pub type StorageNodeArgs = ashlar_storage_node::options::Args;
/// Arguments of `ashlar initiator`.
pub type InitiatorArgs = ashlar_initiator::Args;

fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| "info".into());
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter);
    // A second call only happens in tests, where the first one's subscriber stays.
    let _ = subscriber
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
}

/// Runs a storage node until it is told to stop.
///
/// # Errors
/// Whatever keeps it from serving.
pub fn storage_node(args: StorageNodeArgs) -> anyhow::Result<()> {
    log_to_stderr();
    ashlar_storage_node::run(args)
}

/// Runs an initiator until it is told to stop.
///
/// # Errors
/// Whatever keeps it from serving.
pub fn initiator(args: InitiatorArgs) -> anyhow::Result<()> {
    log_to_stderr();
    ashlar_initiator::run(args)
}
