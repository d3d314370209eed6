//! An initiator on a thread of its own, with a front end that makes the requests of a test.

use std::collections::HashMap;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use ashlar_engine::{EngineKind, Event};
use ashlar_initiator::front_end::{
    ByteRequest, Completed, Context, FrontEnd, IoError, Ticket, VolumeHandle, VolumeInfo, Zero,
};
use ashlar_initiator::handle::InitiatorThreadHandle;
use ashlar_initiator::spec::VolumeSpec;
use ashlar_initiator::status::{AttachmentStatus, MemberState};
use ashlar_initiator::thread::{FrontEndMaker, InitiatorThread, SpawnedThread, ThreadOptions};
use ashlar_replication::message::Content;
use ashlar_replication::values::VolumeId;

pub const PATIENCE: Duration = Duration::from_secs(30);

/// A request that a test makes.
pub enum Job {
    Write(u64, Vec<u8>),
    Read(u64, u32),
    Zero(u64, u64),
    Flush,
}

type Answer = Result<Vec<u8>, IoError>;

struct TestFrontEnd {
    jobs: Receiver<(VolumeId, Job, Sender<Answer>)>,
    doorbell: Option<UnixStream>,
    volumes: HashMap<VolumeId, VolumeHandle>,
    waiting: Vec<(VolumeId, Job, Sender<Answer>)>,
    under_way: HashMap<Ticket, Sender<Answer>>,
    next: u64,
}

impl TestFrontEnd {
    fn submit(&mut self, context: &mut Context<'_>, id: VolumeId, job: Job, to: Sender<Answer>) {
        let Some(volume) = self.volumes.get(&id).copied() else {
            let _ = to.send(Err(IoError::NotAttached));
            return;
        };
        if !context.can_accept(volume) {
            self.waiting.push((id, job, to));
            return;
        }
        self.next += 1;
        let ticket = Ticket(self.next);
        let request = match &job {
            Job::Write(offset, data) => ByteRequest::Write {
                offset: *offset,
                data,
            },
            Job::Read(offset, len) => ByteRequest::Read {
                offset: *offset,
                len: *len,
            },
            Job::Zero(offset, len) => ByteRequest::Zero {
                offset: *offset,
                len: *len,
                kind: Zero::WriteZeroes,
            },
            Job::Flush => ByteRequest::Flush,
        };
        match context.submit(volume, ticket, request) {
            Ok(()) => {
                self.under_way.insert(ticket, to);
            }
            Err(error) => {
                let _ = to.send(Err(error));
            }
        }
    }
}

impl FrontEnd for TestFrontEnd {
    fn start(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        let doorbell = self.doorbell.take().expect("started once");
        let socket = context.engine().adopt(doorbell.into());
        context.own(socket);
        Ok(())
    }

    fn socket_event(&mut self, context: &mut Context<'_>, event: &Event) {
        if let Event::Received { socket } = event {
            let rung = context.engine().input(*socket).len();
            context.engine().consume(*socket, rung);
        }
    }

    fn completed(
        &mut self,
        _: &mut Context<'_>,
        _: VolumeHandle,
        ticket: Ticket,
        result: Result<Completed<'_>, IoError>,
    ) {
        let to = self
            .under_way
            .remove(&ticket)
            .expect("a request of this front end");
        let answer = result.map(|completed| match completed {
            Completed::Read(pieces) => {
                let mut bytes = Vec::new();
                for piece in pieces {
                    match &piece.content {
                        Content::Data(data) => bytes.extend_from_slice(data),
                        Content::Zeros => bytes.resize(bytes.len() + piece.len as usize, 0),
                    }
                }
                bytes
            }
            Completed::Done | Completed::Allocation(_) => Vec::new(),
        });
        // A test that gave up does not want it.
        let _ = to.send(answer);
    }

    fn turn(&mut self, context: &mut Context<'_>) -> ashlar_replication::values::Time {
        let waiting = std::mem::take(&mut self.waiting);
        for (id, job, to) in waiting {
            self.submit(context, id, job, to);
        }
        while let Ok((id, job, to)) = self.jobs.try_recv() {
            self.submit(context, id, job, to);
        }
        ashlar_replication::values::Time::NEVER
    }

    fn volume_attached(&mut self, _: &mut Context<'_>, volume: VolumeHandle, info: &VolumeInfo) {
        self.volumes.insert(info.id, volume);
    }

    fn volume_detached(&mut self, _: &mut Context<'_>, volume: VolumeHandle) {
        self.volumes.retain(|_, known| *known != volume);
    }
}

/// An initiator.
pub struct Client {
    thread: Option<SpawnedThread>,
    jobs: Sender<(VolumeId, Job, Sender<Answer>)>,
    doorbell: UnixStream,
}

impl Client {
    pub fn start(engine: Option<EngineKind>) -> Client {
        let (jobs, receiver) = channel();
        let (doorbell, other) = UnixStream::pair().unwrap();
        let front_end: FrontEndMaker = Box::new(move || {
            Box::new(TestFrontEnd {
                jobs: receiver,
                doorbell: Some(other),
                volumes: HashMap::new(),
                waiting: Vec::new(),
                under_way: HashMap::new(),
                next: 0,
            })
        });
        let mut options = ThreadOptions::default();
        options.engine.kind = engine;
        let thread = Some(InitiatorThread::spawn(options, vec![front_end]).unwrap());
        Client {
            thread,
            jobs,
            doorbell,
        }
    }

    pub fn handle(&self) -> &InitiatorThreadHandle {
        self.thread.as_ref().expect("a running thread").handle()
    }

    pub fn attach(&self, spec: &VolumeSpec) -> AttachmentStatus {
        self.handle().attach(spec.clone(), PATIENCE).unwrap()
    }

    pub fn status(&self, spec: &VolumeSpec) -> AttachmentStatus {
        let list = self.handle().list().unwrap();
        list.into_iter()
            .find(|attachment| attachment.id == spec.id)
            .expect("it is attached")
    }

    pub fn begin(&mut self, spec: &VolumeSpec, job: Job) -> Receiver<Answer> {
        let (to, answer) = channel();
        self.jobs.send((spec.id, job, to)).unwrap();
        self.doorbell.write_all(&[1]).unwrap();
        answer
    }

    pub fn run(&mut self, spec: &VolumeSpec, job: Job) -> Answer {
        self.begin(spec, job)
            .recv_timeout(PATIENCE)
            .expect("an answer in time")
    }

    pub fn write(&mut self, spec: &VolumeSpec, offset: u64, data: &[u8]) {
        self.run(spec, Job::Write(offset, data.to_vec())).unwrap();
    }

    pub fn read(&mut self, spec: &VolumeSpec, offset: u64, len: u32) -> Vec<u8> {
        self.run(spec, Job::Read(offset, len)).unwrap()
    }

    pub fn wait_in_sync(&self, spec: &VolumeSpec, count: usize) {
        let begin = Instant::now();
        loop {
            let status = self.status(spec);
            let in_sync = status
                .members
                .iter()
                .filter(|m| m.state == MemberState::InSync);
            if in_sync.count() == count {
                return;
            }
            assert!(begin.elapsed() < PATIENCE, "{status:#?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn stop(mut self) {
        let thread = self.thread.take().expect("a running thread");
        thread.handle().stop(Duration::from_secs(1));
        thread.join().unwrap();
    }
}
