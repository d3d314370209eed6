//! What is measured: new volumes on nodes started for it, or a volume that exists.

use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::attach;
use crate::bench::args::{Args, Store};
use crate::bench::library_load::LibraryLoad;
use crate::bench::nbd_load::NbdLoad;
use crate::bench::pattern::AlignedBuffer;
use crate::bench::runner::Load;
use crate::context::Context;
use crate::control;
use crate::local::{LocalCluster, LocalOptions};
use crate::nbd::NbdClient;
use crate::node;
use crate::output;
use crate::pinning::Pinning;
use crate::process::Lifetime;
use crate::scratch::Scratch;
use crate::state::{Ack, VolumeRecord};
use crate::units::Size;
use crate::volume::create::{self, VolumePlan};

/// How long an attach may take.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(30);
/// Requests that fill a volume before it is measured.
const FILL_BYTES: usize = 1 << 20;

/// The volumes and the way to them.
pub struct Target {
    volumes: Vec<VolumeRecord>,
    /// Processes started for this.
    cluster: Option<LocalCluster>,
    front_end: FrontEnd,
}

enum FrontEnd {
    Nbd {
        load: Box<NbdLoad>,
        initiator: String,
        attached: Vec<String>,
    },
    Library(Box<LibraryLoad>),
}

/// Bytes that nodes wrote so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Written {
    /// To devices.
    pub device: u64,
    /// For clients, once per replica.
    pub client: u64,
}

impl Target {
    /// Starts what is needed, makes the volumes, fills and attaches them.
    ///
    /// # Errors
    /// When one of it fails.
    pub fn start(
        context: &Context,
        args: &Args,
        scratch: &Scratch,
        pinning: &Pinning,
    ) -> anyhow::Result<Target> {
        let (volumes, cluster) = match &args.volume {
            Some(name) => (vec![context.state.volume(name)?], None),
            None => {
                let (volumes, cluster) = new_volumes(args, scratch, pinning)?;
                (volumes, Some(cluster))
            }
        };
        let span_bytes = volumes.iter().map(|v| v.size_bytes).min().unwrap_or(0);
        let span_bytes = span_bytes.min(args.volume_size.0);
        ensure!(
            span_bytes >= args.size.0,
            "the volume has {}, a request {}",
            Size(span_bytes),
            args.size
        );
        // What exists is read as it is; a new volume without data would be read from nowhere.
        let fill = args.volume.is_none();
        let front_end = if args.nbd {
            let initiator = match &cluster {
                Some(cluster) => cluster.initiator_address()?.to_owned(),
                None => context.initiator()?,
            };
            through_nbd(args, &volumes, initiator, span_bytes, fill)?
        } else {
            let mut load = LibraryLoad::start(args, &volumes, span_bytes, pinning)?;
            if fill {
                let spinner = output::spinner("filling the volumes");
                load.fill(FILL_BYTES)?;
                spinner.finish_and_clear();
            }
            FrontEnd::Library(Box::new(load))
        };
        Ok(Target {
            volumes,
            cluster,
            front_end,
        })
    }

    /// The load on the volumes.
    pub fn load(&mut self) -> Box<dyn Load + '_> {
        match &mut self.front_end {
            FrontEnd::Nbd { load, .. } => Box::new(Borrowed(load.as_mut())),
            FrontEnd::Library(load) => Box::new(Borrowed(load.as_mut())),
        }
    }

    /// Names and ids of the processes whose CPU time counts, this one included.
    pub fn processes(&self) -> Vec<(String, u32)> {
        let mut processes = vec![("client".to_owned(), std::process::id())];
        processes.extend(self.cluster.iter().flat_map(LocalCluster::processes));
        processes
    }

    /// Copies of a volume.
    pub fn replicas(&self) -> usize {
        self.volumes.first().map_or(0, |v| v.data_members().count())
    }

    /// Which acknowledgements a write waits for.
    pub fn ack(&self) -> Ack {
        self.volumes.first().map_or(Ack::Majority, |v| v.ack)
    }

    /// What the report says about the place of the stores.
    pub fn store_name(&self, args: &Args) -> String {
        match (&args.volume, &args.store) {
            (Some(name), _) => format!("volume {name}"),
            (None, Store::Ram) => "ram".into(),
            (None, Store::Disk) => "disk".into(),
            (None, Store::Folder(path)) => path.display().to_string(),
        }
    }

    fn node_status(&self) -> anyhow::Result<Vec<node::NodeStatus>> {
        let mut addresses: Vec<_> = self
            .volumes
            .iter()
            .flat_map(|v| &v.members)
            .map(|m| m.control.clone())
            .collect();
        addresses.sort();
        addresses.dedup();
        control::block_on(async {
            let mut nodes = Vec::new();
            for address in &addresses {
                // A node that is down while its volume is measured is no reason to stop.
                nodes.extend(node::status(address).await.ok());
            }
            Ok(nodes)
        })
    }

    /// Bytes that the nodes wrote so far.
    ///
    /// # Errors
    /// When control calls cannot be made.
    pub fn written(&self) -> anyhow::Result<Written> {
        let nodes = self.node_status()?;
        let devices = nodes.iter().flat_map(|n| &n.devices);
        Ok(devices.fold(Written::default(), |sum, d| Written {
            device: sum.device + d.device_bytes_written,
            client: sum.client + d.client_bytes_written,
        }))
    }

    /// The engines that the nodes use.
    ///
    /// # Errors
    /// When control calls cannot be made.
    pub fn engine(&self) -> anyhow::Result<String> {
        let nodes = self.node_status()?;
        let devices = nodes.into_iter().flat_map(|n| n.devices);
        let mut engines: Vec<_> = devices.map(|d| d.engine).collect();
        engines.sort();
        engines.dedup();
        Ok(engines.join(" and "))
    }

    /// Fails when a process that was started for this has ended.
    ///
    /// # Errors
    /// Then, with the end of its log.
    pub fn check_running(&mut self) -> anyhow::Result<()> {
        self.cluster
            .as_mut()
            .map_or(Ok(()), LocalCluster::check_running)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let FrontEnd::Nbd {
            initiator,
            attached,
            ..
        } = &self.front_end
        {
            for id in attached {
                // A courtesy to whoever attaches next; they would fence us.
                let _ = attach::detach_volume(initiator, id, Duration::from_secs(5));
            }
        }
    }
}

struct Borrowed<'a, L>(&'a mut L);

impl<L: Load> Load for Borrowed<'_, L> {
    fn run(
        &mut self,
        duration: Duration,
        recorder: &mut crate::bench::statistics::Recorder,
    ) -> anyhow::Result<()> {
        self.0.run(duration, recorder)
    }
}

fn new_volumes(
    args: &Args,
    scratch: &Scratch,
    pinning: &Pinning,
) -> anyhow::Result<(Vec<VolumeRecord>, LocalCluster)> {
    let spinner = output::spinner("starting storage nodes");
    let volumes = args.volumes as u64;
    let options = LocalOptions {
        // Headers, the journal, and room so that nothing is ever short.
        store_bytes: volumes * (args.volume_size.0 + (args.volume_size.0 >> 5)) + (192 << 20),
        engine: args.engine,
        busy_poll: Duration::from_micros(args.busy_poll_us),
        pinning: pinning.clone(),
        lifetime: Lifetime::WithParent,
    };
    let mut cluster = LocalCluster::start(args.replicas, scratch.path(), scratch, options)?;
    if args.nbd {
        cluster.start_initiator()?;
    }
    let nodes = cluster.node_addresses();
    let mut records = Vec::new();
    for i in 1..=args.volumes {
        let plan = VolumePlan {
            name: format!("bench-{i}"),
            size_bytes: args.volume_size.0,
            replicas: args.replicas,
            witnesses: 0,
            ack: args.ack,
        };
        records.push(create::create(&cluster.state, &nodes, &plan)?);
    }
    spinner.finish_and_clear();
    Ok((records, cluster))
}

fn through_nbd(
    args: &Args,
    volumes: &[VolumeRecord],
    initiator: String,
    span_bytes: u64,
    fill: bool,
) -> anyhow::Result<FrontEnd> {
    let before = control::block_on(attach::attachments(&initiator))?;
    let (mut uris, mut attached) = (Vec::new(), Vec::new());
    for volume in volumes {
        let attachment = attach::attach_volume(&initiator, volume, ATTACH_TIMEOUT)?;
        if before.iter().all(|a| a.volume_id != volume.id) {
            attached.push(volume.id.clone());
        }
        let uri = attachment
            .nbd_uris
            .first()
            .context("the initiator serves no NBD")?;
        if fill {
            fill_through_nbd(uri, span_bytes)?;
        }
        uris.push(uri.clone());
    }
    let load = NbdLoad::connect(&uris, args.mode, span_bytes, args.bytes(), args.depth)?;
    Ok(FrontEnd::Nbd {
        load: Box::new(load),
        initiator,
        attached,
    })
}

fn fill_through_nbd(uri: &str, span_bytes: u64) -> anyhow::Result<()> {
    let bar = output::progress_bar(span_bytes, "filling the volume");
    let mut client = NbdClient::connect(uri)?;
    let mut data = AlignedBuffer::noise(FILL_BYTES, 11);
    for offset in (0..span_bytes).step_by(FILL_BYTES) {
        data.stamp(offset);
        let len = (span_bytes - offset).min(FILL_BYTES as u64) as usize;
        client
            .write_at(offset, &data[..len])
            .context("filling the volume")?;
        bar.set_position(offset);
    }
    client.flush()?;
    bar.finish_and_clear();
    Ok(())
}
