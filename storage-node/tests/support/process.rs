//! The real program in a process of its own.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use ashlar_control_api::storage_node::storage_node_client::StorageNodeClient;
use ashlar_engine::Address;
use rustix::process::{Pid, Signal, kill_process};
use tonic::transport::{Channel, Endpoint};

/// A storage node.
pub struct Process {
    child: Child,
    _stdout: BufReader<ChildStdout>,
    pub control: String,
    pub metrics: String,
    pub data: Vec<Address>,
    pub device_ids: Vec<String>,
}

/// A command with the sockets of the node in `folder`.
pub fn command(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ashlar-storage-node"));
    command
        .arg(format!("--control=unix:{}/control", folder.display()))
        .arg("--metrics=127.0.0.1:0")
        .arg("--announce")
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    command
}

impl Process {
    /// Starts a node with one store in `folder`, and `more` arguments.
    pub fn start(folder: &Path, more: &[&str]) -> Process {
        let store = folder.join("store");
        std::fs::create_dir_all(&store).unwrap();
        let mut command = command(folder);
        command
            .arg(format!("--store={}", store.display()))
            .arg("--format-size=96MiB")
            .arg("--journal-size=16MiB")
            .arg(format!("--listen=unix:{}/data", folder.display()))
            .args(more);
        Process::spawn(command)
    }

    pub fn spawn(mut command: Command) -> Process {
        let mut child = command.spawn().expect("the program starts");
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let announced: serde_json::Value =
            serde_json::from_str(&line).expect("one line of JSON once it serves");
        let list = |name: &str| -> Vec<String> {
            let values = announced[name].as_array().unwrap().iter();
            values.map(|v| v.as_str().unwrap().to_owned()).collect()
        };
        Process {
            child,
            _stdout: stdout,
            control: announced["control"].as_str().unwrap().to_owned(),
            metrics: announced["metrics"].as_str().unwrap().to_owned(),
            data: list("data").iter().map(|a| a.parse().unwrap()).collect(),
            device_ids: list("device_ids"),
        }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id() as i32).unwrap(), signal).unwrap();
    }

    /// SIGKILL.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// SIGTERM; panics unless the exit status is 0.
    pub fn terminate(self) {
        self.signal(Signal::TERM);
        self.wait_success();
    }

    /// Waits for its end; panics unless the exit status is 0.
    pub fn wait_success(mut self) {
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
    }

    pub async fn control(&self) -> StorageNodeClient<Channel> {
        let uri = match self.control.strip_prefix("unix:") {
            Some(_) => self.control.clone(),
            None => format!("http://{}", self.control),
        };
        let channel = Endpoint::from_shared(uri).unwrap().connect().await.unwrap();
        StorageNodeClient::new(channel)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
