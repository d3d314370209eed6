//! One connection to one device.

use std::collections::VecDeque;
use std::fmt;

use ashlar_engine::{Address, Engine, SocketId};
use ashlar_replication::message::{Content, Refusal, Reply, Request, RequestId};
use ashlar_replication::values::{DeviceId, Epoch, Time};
use ashlar_wire::proof::{Challenges, Proof, fence_proof, verify_promise};
use ashlar_wire::{Fence, Hello, Payload, Promise, VERSION, Welcome, encode};

use super::incoming::{self, Incoming, Next};
use super::link::{Attachment, Link, LinkId, Links};
use super::{
    ConnectionCounters, ConnectionOptions, GREETING_TIMEOUT, Notice, NoticeKind, QUEUE_BYTES_MAX,
    SILENCE_MIN,
};
use crate::backoff::Backoff;
use crate::random;

/// Who is at the other end. Volumes that name the same peer share a connection.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Peer {
    pub(crate) device: DeviceId,
    pub(crate) address: Address,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} at {}", self.device, self.address)
    }
}

#[derive(Debug)]
enum State {
    Waiting {
        until: Time,
    },
    Greeting {
        socket: SocketId,
        until: Time,
        client: [u8; 16],
    },
    Up {
        socket: SocketId,
        since: Time,
        challenges: Challenges,
        renewal: Renewal,
    },
}

/// The renewal of the lease of all volumes of the connection. One at a time is under way.
#[derive(Debug)]
struct Renewal {
    sent: Option<Time>,
    next: Time,
}

/// What a connection needs of its thread in each call.
pub(super) struct Surroundings<'a> {
    pub(super) engine: &'a mut Engine,
    pub(super) notices: &'a mut VecDeque<Notice>,
    pub(super) counters: &'a mut ConnectionCounters,
    pub(super) options: &'a ConnectionOptions,
    /// Reused for frames and for checksums.
    pub(super) out: &'a mut Vec<u8>,
    pub(super) crcs: &'a mut Vec<u32>,
}

/// Whether a connection goes on after input or a timer.
type Outcome = Result<(), String>;

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) peer: Peer,
    pub(super) links: Links,
    state: State,
    backoff: Backoff,
    last_error: Option<String>,
}

impl Connection {
    pub(super) fn new(peer: Peer) -> Connection {
        Connection {
            peer,
            links: Links::default(),
            state: State::Waiting { until: Time(0) },
            backoff: Backoff::new(random::number()),
            last_error: None,
        }
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(self.state, State::Up { .. })
    }

    pub(super) fn socket(&self) -> Option<SocketId> {
        match self.state {
            State::Waiting { .. } => None,
            State::Greeting { socket, .. } | State::Up { socket, .. } => Some(socket),
        }
    }

    /// Why the connection is down, for people.
    pub(super) fn trouble(&self) -> Option<&str> {
        if self.is_up() {
            None
        } else {
            Some(self.last_error.as_deref().unwrap_or("connecting"))
        }
    }

    pub(super) fn next_timer(&self, options: &ConnectionOptions) -> Time {
        match &self.state {
            State::Waiting { until } | State::Greeting { until, .. } => *until,
            State::Up {
                renewal: Renewal {
                    sent: Some(sent), ..
                },
                ..
            } => *sent + silence(options),
            State::Up { renewal, .. } => renewal.next,
        }
    }

    /// Does what is due.
    pub(super) fn timer(&mut self, s: &mut Surroundings<'_>) {
        let now = s.engine.now();
        if self.next_timer(s.options) > now {
            return;
        }
        match &mut self.state {
            State::Waiting { .. } => self.connect(s),
            State::Greeting { .. } => self.fail(s, "no answer to the greeting".into()),
            State::Up {
                renewal: Renewal {
                    sent: Some(sent), ..
                },
                ..
            } => {
                let seconds = now.since(*sent).as_secs_f32();
                self.fail(s, format!("no answer for {seconds:.0} s"));
            }
            State::Up {
                socket, renewal, ..
            } => {
                renewal.sent = Some(now);
                renewal.next = now + s.options.lease / 3;
                s.out.clear();
                encode::renew(s.out, now.0);
                s.send(*socket);
            }
        }
    }

    fn connect(&mut self, s: &mut Surroundings<'_>) {
        let socket = match s.engine.connect(&self.peer.address) {
            Ok(socket) => socket,
            Err(error) => return self.fail(s, format!("cannot connect: {error}")),
        };
        let client = random::bytes();
        let until = s.engine.now() + GREETING_TIMEOUT;
        self.state = State::Greeting {
            socket,
            until,
            client,
        };
        s.out.clear();
        let hello = Hello {
            version_min: VERSION,
            version_max: VERSION,
            features: 0,
            nonce: client,
            initiator: s.options.initiator,
        };
        encode::hello(s.out, &hello);
        s.send(socket);
    }

    /// The connection is of no more use; another attempt follows.
    pub(super) fn fail(&mut self, s: &mut Surroundings<'_>, error: String) {
        let now = s.engine.now();
        if let Some(socket) = self.socket() {
            s.engine.close(socket);
        }
        if let State::Up { since, .. } = self.state {
            tracing::info!(peer = %self.peer, error, "connection lost");
            self.backoff.was_up(since, now);
            for link in self.links.iter() {
                s.notices.push_back(link.notice(NoticeKind::Down));
            }
        } else if self.last_error.as_ref() != Some(&error) {
            // Attempts go on twice a second: the same reason is said once.
            tracing::debug!(peer = %self.peer, error, "cannot connect");
        }
        s.counters.lost += 1;
        self.links.reset();
        self.last_error = Some(error);
        self.state = State::Waiting {
            until: self.backoff.next(now),
        };
    }

    /// The engine says that the socket ended.
    pub(super) fn closed(&mut self, s: &mut Surroundings<'_>, error: Option<&std::io::Error>) {
        // A farewell may be there still.
        self.received(s);
        if self.socket().is_some() {
            let error = error.map_or("closed by the node".into(), ToString::to_string);
            self.fail(s, error);
        }
    }

    /// Handles all whole frames of the input.
    pub(super) fn received(&mut self, s: &mut Surroundings<'_>) {
        while let Some(socket) = self.socket() {
            let outcome = match incoming::next(s.engine.input(socket), s.crcs) {
                Next::Need(bytes) => {
                    s.engine.need(socket, bytes);
                    return;
                }
                Next::Bad(error) => {
                    s.counters.malformed += 1;
                    Err(error)
                }
                Next::Frame(frame, bytes) => {
                    s.counters.bytes_received += bytes as u64;
                    let outcome = self.frame(s, socket, frame);
                    if outcome.is_ok() {
                        s.engine.consume(socket, bytes);
                    }
                    outcome
                }
            };
            if let Err(error) = outcome {
                self.fail(s, error);
            }
        }
    }

    fn frame(&mut self, s: &mut Surroundings<'_>, socket: SocketId, frame: Incoming) -> Outcome {
        if let Incoming::Goodbye(code, text) = frame {
            return Err(format!("the node ended the connection ({code:?}): {text}"));
        }
        if let State::Greeting { client, .. } = self.state {
            return match frame {
                Incoming::Welcome(welcome) => self.welcomed(s, socket, client, &welcome),
                _ => Err("the node did not answer the greeting first".into()),
            };
        }
        match frame {
            Incoming::Reply { handle, reply } => self.reply(s, handle, reply),
            Incoming::Data {
                handle,
                id,
                positions,
                span,
            } => {
                let (reply, good) =
                    incoming::take_data(s.engine, socket, span, s.crcs, id, positions);
                s.counters.checksum_mismatches += u64::from(!good);
                self.reply(s, handle, reply);
            }
            Incoming::Promised {
                handle,
                promise,
                answer,
                proof,
            } => {
                self.promised(s, handle, promise, &answer, &proof);
            }
            Incoming::Renewed { echo } => self.renewed(s, Time(echo)),
            Incoming::Fenced { handle, promised } => {
                if let Some(link) = self.links.by_handle(handle) {
                    if let Attachment::Promised(epoch) = link.attachment {
                        link.attachment = Attachment::Superseded(epoch);
                    }
                    s.notices
                        .push_back(link.notice(NoticeKind::Fenced { promised }));
                }
            }
            Incoming::Welcome(_) => return Err("the node greeted twice".into()),
            Incoming::Goodbye(..) => {}
        }
        Ok(())
    }

    fn welcomed(
        &mut self,
        s: &mut Surroundings<'_>,
        socket: SocketId,
        client: [u8; 16],
        welcome: &Welcome,
    ) -> Outcome {
        if welcome.version != VERSION {
            return Err(format!(
                "the node speaks version {}, not {VERSION}",
                welcome.version
            ));
        }
        if welcome.device != self.peer.device {
            return Err(format!("another device answers there: {}", welcome.device));
        }
        let lease = s.options.lease.as_millis();
        if u128::from(welcome.lease_ms) != lease {
            // A6 and L1 are safe only with one constant for all.
            let theirs = welcome.lease_ms;
            return Err(format!(
                "the node's lease lasts {theirs} ms, this initiator's {lease} ms"
            ));
        }
        let now = s.engine.now();
        self.state = State::Up {
            socket,
            since: now,
            challenges: Challenges {
                client,
                server: welcome.nonce,
            },
            renewal: Renewal {
                sent: None,
                next: now + s.options.lease / 3,
            },
        };
        s.counters.established += 1;
        if self.last_error.take().is_some() {
            tracing::info!(peer = %self.peer, "connected again");
        }
        for link in self.links.iter() {
            s.notices.push_back(link.notice(NoticeKind::Up));
        }
        Ok(())
    }

    fn promised(
        &mut self,
        s: &mut Surroundings<'_>,
        handle: u32,
        promise: Promise,
        answer: &[u8],
        proof: &Proof,
    ) {
        let Some(link) = self.links.by_handle(handle) else {
            return;
        };
        // A repeated Fence is answered again; one that was not sent is not.
        let Some(epoch) = link.attachment.epoch() else {
            return;
        };
        let State::Up { challenges, .. } = &self.state else {
            return;
        };
        let subject = link.subject(epoch, handle);
        let proved = promise.epoch == epoch
            && verify_promise(&link.spec.key, challenges, &subject, answer, proof);
        let reply = if proved {
            link.attachment = Attachment::Promised(epoch);
            let Promise {
                epoch,
                state,
                size_blocks,
                torn,
            } = promise;
            Reply::Promised {
                epoch,
                state,
                size_blocks,
                torn,
            }
        } else {
            s.counters.bad_proofs += 1;
            link.attachment = Attachment::None;
            Reply::Refused {
                id: RequestId(0),
                refusal: Refusal::Unauthenticated,
            }
        };
        s.notices.push_back(link.notice(NoticeKind::Reply(reply)));
    }

    fn reply(&mut self, s: &mut Surroundings<'_>, handle: u32, reply: Reply<Payload>) {
        // Nobody: a late answer to an older epoch of the volume.
        let Some(link) = self.links.by_handle(handle) else {
            return;
        };
        let answers_fence = matches!(
            reply,
            Reply::Refused {
                id: RequestId(0),
                ..
            }
        );
        if link.attachment.is_proved() || answers_fence {
            s.notices.push_back(link.notice(NoticeKind::Reply(reply)));
        }
    }

    fn renewed(&mut self, s: &mut Surroundings<'_>, sent_at: Time) {
        let State::Up { renewal, .. } = &mut self.state else {
            return;
        };
        if renewal.sent != Some(sent_at) {
            return;
        }
        renewal.sent = None;
        for link in self.links.iter() {
            if matches!(link.attachment, Attachment::Promised(_)) {
                s.notices
                    .push_back(link.notice(NoticeKind::Renewed { sent_at }));
            }
        }
    }

    /// Sends a request of a link. False when too much output waits: the caller cuts the peer off.
    /// Without a connection the request is dropped, as the volume has been or will be told.
    pub(super) fn send(
        &mut self,
        s: &mut Surroundings<'_>,
        id: LinkId,
        request: &Request<Payload>,
    ) -> bool {
        let State::Up {
            socket, challenges, ..
        } = &self.state
        else {
            return true;
        };
        s.out.clear();
        if let Request::Fence { epoch } = request {
            put_fence(s.out, &mut self.links, id, *epoch, challenges);
        } else {
            let handle = self.links.get_mut(id).and_then(|link| link.handle);
            let Some(handle) = handle else { return true };
            encode::request(s.out, handle, request);
        }
        s.send(*socket);
        if let Some(Content::Data(payload)) = content(request) {
            s.counters.bytes_sent += payload.data().len() as u64;
            s.engine.send_shared(*socket, payload.data().clone());
        }
        s.engine.queued_bytes(*socket) <= QUEUE_BYTES_MAX
    }

    /// Says that the attachment of a link is over, and forgets the link.
    pub(super) fn remove(&mut self, s: &mut Surroundings<'_>, id: LinkId) {
        let Some(link) = self.links.remove(id) else {
            return;
        };
        if let (State::Up { socket, .. }, Some(handle)) = (&self.state, link.handle) {
            s.out.clear();
            encode::release(s.out, handle);
            s.send(*socket);
        }
    }

    /// Makes as if the connection had been lost and made again, for one link.
    pub(super) fn renew_link(&mut self, s: &mut Surroundings<'_>, id: LinkId) {
        let State::Up { socket, .. } = self.state else {
            return;
        };
        if let Some(handle) = self.links.release(id) {
            s.out.clear();
            encode::release(s.out, handle);
            s.send(socket);
        }
        if let Some(link) = self.links.get_mut(id) {
            let notices = [NoticeKind::Down, NoticeKind::Up].map(|kind| link.notice(kind));
            s.notices.extend(notices);
        }
    }

    /// Output that the peer has not taken.
    pub(super) fn queued_bytes(&self, engine: &Engine) -> usize {
        self.socket()
            .map_or(0, |socket| engine.queued_bytes(socket))
    }

    pub(super) fn close(&mut self, engine: &mut Engine) {
        if let Some(socket) = self.socket() {
            engine.close(socket);
        }
        self.state = State::Waiting { until: Time::NEVER };
    }
}

impl Surroundings<'_> {
    fn send(&mut self, socket: SocketId) {
        self.counters.bytes_sent += self.out.len() as u64;
        self.engine.send(socket, self.out);
    }
}

impl Link {
    pub(super) fn notice(&self, kind: NoticeKind) -> Notice {
        Notice {
            volume: self.spec.volume,
            member: self.spec.member,
            kind,
        }
    }
}

/// A Fence of another epoch takes another handle; the same one again keeps it.
fn put_fence(
    out: &mut Vec<u8>,
    links: &mut Links,
    id: LinkId,
    epoch: Epoch,
    challenges: &Challenges,
) {
    let before = links.get_mut(id).and_then(|link| link.attachment.epoch());
    if before != Some(epoch)
        && let Some(old) = links.release(id)
    {
        encode::release(out, old);
    }
    let Some((handle, link)) = links.handle(id) else {
        return;
    };
    if link.attachment == Attachment::None {
        link.attachment = Attachment::Fencing(epoch);
    }
    let subject = link.subject(epoch, handle);
    let proof = fence_proof(&link.spec.key, challenges, &subject);
    encode::fence(out, &Fence { subject, proof });
}

fn silence(options: &ConnectionOptions) -> std::time::Duration {
    (options.lease * 2).max(SILENCE_MIN)
}

fn content(request: &Request<Payload>) -> Option<&Content<Payload>> {
    match request {
        Request::Write { content, .. }
        | Request::Copy { content, .. }
        | Request::Equalise { content, .. }
        | Request::Repair { content, .. } => Some(content),
        _ => None,
    }
}
