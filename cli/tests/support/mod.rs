//! Real storage nodes and a real initiator daemon on loopback, to be killed, stopped and restarted.
#![allow(dead_code, reason = "each test binary uses its part of this module")]

pub mod seccomp;

use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use serde_json::Value;

/// Whether the processes may use io_uring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoUring {
    Allowed,
    /// By a seccomp filter, as in a container.
    Forbidden,
}

/// What a test wants.
pub struct Options {
    pub nodes: usize,
    pub store_bytes: u64,
    /// Stores below /dev/shm, or beside the build.
    pub ram: bool,
    pub io_uring: IoUring,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            nodes: 3,
            store_bytes: 1 << 30,
            ram: false,
            io_uring: IoUring::Allowed,
        }
    }
}

/// A `Command` of the tool under test.
pub fn ashlar() -> Command {
    Command::new(env!("CARGO_BIN_EXE_ashlar"))
}

/// A storage node that can be killed and started again on the same store and port.
pub struct Node {
    pub store: PathBuf,
    pub control: String,
    pub data: String,
    pub metrics: String,
    child: Option<Child>,
}

/// Nodes, an initiator daemon, and a state directory for the tool.
pub struct Cluster {
    pub directory: tempfile::TempDir,
    pub nodes: Vec<Node>,
    options: Options,
    initiator: Option<Child>,
}

fn free_port() -> u16 {
    let listener = TcpListener::bind(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.local_addr().expect("an address").port()
}

/// Runs a command to its end; panics with its output when it fails.
pub fn run(command: &mut Command) -> Output {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Waits until `ready` says yes; panics with `what` after `limit`.
pub fn wait_until(what: &str, limit: Duration, mut ready: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !ready() {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        // A poll of another process's state; nothing here is measured by it.
        std::thread::sleep(Duration::from_millis(20));
    }
    start.elapsed()
}

/// A temporary directory in memory or on the disk of the build.
pub fn temporary(ram: bool) -> tempfile::TempDir {
    let parent = if ram {
        Path::new("/dev/shm")
    } else {
        Path::new(env!("CARGO_TARGET_TMPDIR"))
    };
    tempfile::Builder::new()
        .prefix("ashlar-test-")
        .tempdir_in(parent)
        .expect("a directory")
}

impl Cluster {
    pub fn start(options: Options) -> Cluster {
        let directory = temporary(options.ram);
        let path = directory.path();
        let node = |n: usize| Node {
            store: path.join(format!("store-{n}")),
            control: format!("unix:{}", path.join(format!("node-{n}.control")).display()),
            data: format!("tcp:127.0.0.1:{}", free_port()),
            metrics: format!("127.0.0.1:{}", free_port()),
            child: None,
        };
        let nodes: Vec<_> = (0..options.nodes).map(node).collect();
        let mut cluster = Cluster {
            nodes,
            directory,
            options,
            initiator: None,
        };
        for n in 0..cluster.nodes.len() {
            cluster.start_node(n);
        }
        cluster.start_initiator();
        let state = serde_json::json!({
            "nodes": cluster.nodes.iter().map(|n| n.control.clone()).collect::<Vec<_>>(),
            "initiator": cluster.initiator_socket(),
        });
        std::fs::create_dir_all(cluster.state()).expect("state directory");
        std::fs::write(cluster.state().join("cluster.json"), state.to_string()).expect("state");
        cluster
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn state(&self) -> PathBuf {
        self.path().join("state")
    }

    pub fn initiator_socket(&self) -> String {
        format!("unix:{}", self.path().join("initiator.socket").display())
    }

    fn spawn(&self, name: &str, arguments: &[String]) -> Child {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.path().join(format!("{name}.log")))
            .expect("a log");
        let mut command = ashlar();
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log);
        let io_uring = self.options.io_uring;
        // SAFETY: system calls only, no allocation and no lock, between fork and exec.
        unsafe {
            command.pre_exec(move || {
                set_parent_process_death_signal(Some(Signal::KILL))?;
                if io_uring == IoUring::Forbidden {
                    seccomp::forbid_io_uring()?;
                }
                Ok(())
            });
        }
        let mut child = command.spawn().expect("the tool under test starts");
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().expect("stdout"));
        stdout.read_line(&mut line).expect("an announcement");
        assert!(
            line.starts_with('{'),
            "{name} did not start: {}",
            self.log(name)
        );
        // Keeps the pipe open and empty for the life of the child.
        std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
        child
    }

    pub fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.path().join(format!("{name}.log"))).unwrap_or_default()
    }

    pub fn start_node(&mut self, n: usize) {
        let node = &self.nodes[n];
        let arguments = [
            "storage-node",
            "--store",
            &node.store.display().to_string(),
            "--format-size",
            &self.options.store_bytes.to_string(),
            "--listen",
            &node.data,
            "--control",
            &node.control,
            "--metrics",
            &node.metrics,
            "--announce",
        ]
        .map(String::from);
        let child = self.spawn(&format!("node-{n}"), &arguments);
        self.nodes[n].child = Some(child);
    }

    pub fn start_initiator(&mut self) {
        let nbd = format!("unix:{}", self.path().join("nbd.socket").display());
        let arguments = [
            "initiator",
            "--listen",
            &self.initiator_socket(),
            "--nbd",
            &nbd,
            "--announce",
        ]
        .map(String::from);
        self.initiator = Some(self.spawn("initiator", &arguments));
    }

    pub fn node_pid(&self, n: usize) -> u32 {
        self.nodes[n].child.as_ref().expect("a running node").id()
    }

    pub fn initiator_pid(&self) -> u32 {
        self.initiator.as_ref().expect("a running initiator").id()
    }

    pub fn signal_node(&self, n: usize, signal: Signal) {
        send(self.node_pid(n), signal);
    }

    pub fn kill_node(&mut self, n: usize) {
        let mut child = self.nodes[n].child.take().expect("a running node");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    pub fn kill_initiator(&mut self) {
        let mut child = self.initiator.take().expect("a running initiator");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    /// SIGKILL to everybody before anybody is waited for.
    pub fn kill_all(&mut self) {
        let mut children: Vec<_> = self
            .nodes
            .iter_mut()
            .filter_map(|n| n.child.take())
            .chain(self.initiator.take())
            .collect();
        for child in &mut children {
            child.kill().expect("kill");
        }
        for child in &mut children {
            child.wait().expect("wait");
        }
    }

    pub fn start_all(&mut self) {
        for n in 0..self.nodes.len() {
            self.start_node(n);
        }
        self.start_initiator();
    }

    /// The tool with this cluster's state directory.
    pub fn tool(&self, arguments: &[&str]) -> Command {
        let mut command = ashlar();
        command.arg("--state").arg(self.state()).args(arguments);
        command
    }

    /// Runs the tool with `-o json` and returns what it printed.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let output = run(self.tool(arguments).args(["-o", "json"]));
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
            panic!(
                "{arguments:?}: {error}: {}",
                String::from_utf8_lossy(&output.stdout)
            )
        })
    }

    pub fn create_volume(&self, name: &str, size: &str, more: &[&str]) {
        run(self
            .tool(&["volume", "create", name, "--size", size])
            .args(more));
    }

    /// Attaches and returns the NBD URI on the unix socket.
    pub fn attach(&self, name: &str) -> String {
        let attachment = self.json(&["attach", name]);
        let uris = attachment["nbd_uris"].as_array().expect("nbd_uris").clone();
        let uri = uris
            .iter()
            .filter_map(Value::as_str)
            .find(|u| u.starts_with("nbd+unix"));
        uri.unwrap_or_else(|| panic!("no unix NBD address in {attachment}"))
            .to_owned()
    }

    pub fn detach(&self, name: &str) {
        run(&mut self.tool(&["detach", name]));
    }

    /// States of the members as the initiator sees them: "in-sync", "resyncing", "down".
    pub fn member_states(&self, name: &str) -> Vec<String> {
        let status = self.json(&["volume", "status", name]);
        let members = status["attachment"]["members"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        members
            .iter()
            .filter_map(|m| m["state"].as_str().map(str::to_owned))
            .collect()
    }

    pub fn wait_in_sync(&self, name: &str, members: usize) {
        wait_until("all members in sync", Duration::from_secs(60), || {
            let states = self.member_states(name);
            states.len() == members && states.iter().all(|s| s == "in-sync")
        });
    }

    /// All copies are equal, block by block, and match their checksums on the devices.
    pub fn assert_replicas_equal(&self, name: &str) {
        run(&mut self.tool(&["replicas", "compare", name, "--verify-data"]));
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for n in 0..self.nodes.len() {
                eprintln!("--- node-{n}\n{}", self.log(&format!("node-{n}")));
            }
            eprintln!("--- initiator\n{}", self.log("initiator"));
        }
        self.kill_all();
    }
}

/// Sends a signal to a process of this test.
pub fn send(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).expect("a pid")).expect("a pid");
    kill_process(pid, signal).expect("a signal");
}

/// Resident memory of a process in bytes.
pub fn resident_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = status
        .lines()
        .find(|l| l.starts_with("VmRSS:"))
        .expect("VmRSS");
    let kib: u64 = line
        .split_whitespace()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .expect("a number");
    kib * 1024
}

/// CPU time of a process so far (user and system), all threads.
pub fn cpu_time(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("stat");
    // The name in parentheses may hold spaces; fields count from behind it.
    let fields: Vec<_> = stat[stat.rfind(')').expect("a name") + 2..]
        .split(' ')
        .collect();
    let ticks: u64 =
        fields[11].parse::<u64>().expect("utime") + fields[12].parse::<u64>().expect("stime");
    Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}
