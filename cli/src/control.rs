//! Clients of the control interfaces, with errors that say what to do.

use std::future::Future;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use ashlar_control_api::initiator::initiator_client::InitiatorClient;
use ashlar_control_api::storage_node::storage_node_client::StorageNodeClient;
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

/// Client of one storage node's control interface.
pub type Node = StorageNodeClient<Channel>;
/// Client of an initiator daemon's attach interface.
pub type Initiator = InitiatorClient<Channel>;

/// How long a connection may take to come up: all addresses are near.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long an answer may take. Creating or deleting a replica writes a few pages; attach and
/// detach wait for others and set their own limit.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs control calls to their end on this thread.
///
/// # Errors
/// What `future` fails with, or that there is no runtime.
pub fn block_on<T>(future: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the runtime for control calls")?
        .block_on(future)
}

/// The URI that tonic knows an address by: "HOST:PORT", "tcp:HOST:PORT", "http://…", "unix:PATH".
pub fn uri(address: &str) -> String {
    if address.starts_with("unix:") || address.contains("://") {
        return address.to_owned();
    }
    format!("http://{}", address.strip_prefix("tcp:").unwrap_or(address))
}

async fn connect(address: &str, timeout: Duration) -> anyhow::Result<Channel> {
    let endpoint = Endpoint::from_shared(uri(address))
        .with_context(|| format!("{address:?} is not an address; write HOST:PORT or unix:PATH"))?;
    Ok(endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .timeout(timeout)
        .connect()
        .await?)
}

/// Connects to the storage node at `address`.
///
/// # Errors
/// When it cannot be reached.
pub async fn node(address: &str) -> anyhow::Result<Node> {
    let channel = connect(address, ANSWER_TIMEOUT).await.with_context(|| {
        format!("cannot reach the storage node at {address}; is it running, and is this its control address?")
    })?;
    Ok(Node::new(channel))
}

/// Connects to the initiator at `address`.
///
/// # Errors
/// When it cannot be reached.
pub async fn initiator(address: &str, timeout: Duration) -> anyhow::Result<Initiator> {
    let channel = connect(address, timeout).await.with_context(|| {
        format!(
            "cannot reach the initiator at {address}; is it running, and may you open its socket?"
        )
    })?;
    Ok(Initiator::new(channel))
}

/// The answer of a call, or its error with `what` was tried in front.
///
/// # Errors
/// When the call failed.
pub fn answer<T>(what: &str, result: Result<Response<T>, Status>) -> anyhow::Result<T> {
    result
        .map(Response::into_inner)
        .map_err(|status| refused(what, &status))
}

/// An error for people from a status.
pub fn refused(what: &str, status: &Status) -> anyhow::Error {
    let reason = match status.message() {
        "" => format!("{:?}", status.code()),
        message => message.to_owned(),
    };
    anyhow!("{what}: {reason}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_an_address_becomes_a_uri() {
        assert_eq!(uri("127.0.0.1:70"), "http://127.0.0.1:70");
        assert_eq!(uri("tcp:[::1]:70"), "http://[::1]:70");
        assert_eq!(uri("http://a:1"), "http://a:1");
        assert_eq!(uri("unix:/run/x"), "unix:/run/x");
    }

    #[test]
    fn an_absent_node_is_named_with_what_to_check() {
        let error = block_on(async { node("127.0.0.1:1").await.map(|_| ()) }).unwrap_err();
        let text = format!("{error:#}");
        assert!(
            text.contains("127.0.0.1:1") && text.contains("is it running"),
            "{text}"
        );
    }
}
