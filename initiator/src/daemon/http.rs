//! `/metrics`, `/healthz` and `/readyz`.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus::{Encoder as _, TextEncoder};

use super::attachments::Attachments;
use super::families;
use crate::nbd::NbdCounters;

/// A thread that does not answer in this time hangs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// What the routes look at.
#[derive(Clone)]
pub struct Shared {
    /// The volumes and their threads.
    pub attachments: Arc<Attachments>,
    /// Of the NBD server of each thread.
    pub nbd: Arc<[Arc<NbdCounters>]>,
}

/// The routes of an initiator.
pub fn router(shared: Shared) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(health))
        .route("/readyz", get(health))
        .with_state(shared)
}

/// Healthy, and ready for attaches, while every thread answers. Volumes that wait for members do
/// not count: a restart would not help them.
async fn health(State(Shared { attachments, .. }): State<Shared>) -> (StatusCode, String) {
    match tokio::time::timeout(ANSWER_TIMEOUT, attachments.list()).await {
        Ok(Ok(list)) => (
            StatusCode::OK,
            format!("ok, {} volumes attached\n", list.len()),
        ),
        Ok(Err(stopped)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{stopped}\n")),
        Err(_) => (
            StatusCode::SERVICE_UNAVAILABLE,
            "a thread does not answer\n".into(),
        ),
    }
}

async fn metrics(State(Shared { attachments, nbd }): State<Shared>) -> Response {
    let both = async { (attachments.metrics().await, attachments.list().await) };
    let (threads, volumes) = match tokio::time::timeout(ANSWER_TIMEOUT, both).await {
        Ok((Ok(threads), Ok(volumes))) => (threads, volumes),
        _ => return (StatusCode::SERVICE_UNAVAILABLE, "a thread does not answer").into_response(),
    };
    let (encoder, mut out) = (TextEncoder::new(), Vec::new());
    match encoder.encode(&families::all(&threads, &volumes, &nbd), &mut out) {
        Ok(()) => {
            let content_type = encoder.format_type().to_owned();
            ([(header::CONTENT_TYPE, content_type)], out).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
