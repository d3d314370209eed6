//! The state directory: where the nodes are, and the volumes with their keys.
//!
//! `cluster.json` holds the control addresses of the storage nodes and the initiator's socket.
//! `volumes/NAME.json` holds one volume: id, size, members and key, readable by the owner only
//! (mode 0600), because whoever has the key can write the volume.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use ashlar_control_api::{initiator, storage_node};
use serde::{Deserialize, Serialize};

/// The longest name of a volume: it becomes an NBD export name and a file name.
pub const NAME_BYTES_MAX: usize = 63;

/// The state directory.
#[derive(Clone, Debug)]
pub struct StateDir {
    path: PathBuf,
}

/// `cluster.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cluster {
    /// Control addresses, "HOST:PORT" or "unix:PATH".
    pub nodes: Vec<String>,
    /// The attach API's socket of the initiator daemon on this machine, "unix:PATH".
    pub initiator: Option<String>,
}

/// Which acknowledgements a write waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Ack {
    /// A majority of the data members.
    #[default]
    Majority,
    /// Every in-sync data member.
    All,
}

/// What a member does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Holds blocks.
    Data,
    /// Votes only.
    Witness,
}

/// A member of a volume and where it is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberRecord {
    /// UUID of the device.
    pub device_id: String,
    /// Drawn when the replica was made.
    #[serde(with = "hex_u64")]
    pub nonce: u64,
    /// What it does.
    pub role: Role,
    /// Control address of the node that has the device.
    pub control: String,
    /// "tcp:HOST:PORT" or "unix:PATH".
    pub data_address: String,
}

/// `volumes/NAME.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// The name; also the NBD export name.
    pub name: String,
    /// UUID.
    pub id: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Which acknowledgements a write waits for.
    pub ack: Ack,
    /// 32 bytes.
    #[serde(with = "hex_key")]
    pub key: [u8; 32],
    /// In the order of their device ids.
    pub members: Vec<MemberRecord>,
}

impl StateDir {
    /// The directory at `path`, or the default: `$XDG_STATE_HOME/ashlar`, else
    /// `~/.local/state/ashlar`.
    ///
    /// # Errors
    /// When neither `path` nor a home directory is known.
    pub fn new(path: Option<PathBuf>) -> anyhow::Result<StateDir> {
        let absolute = |name| {
            std::env::var_os(name)
                .map(PathBuf::from)
                .filter(|p| p.is_absolute())
        };
        let path = path
            .or_else(|| absolute("XDG_STATE_HOME").map(|p| p.join("ashlar")))
            .or_else(|| absolute("HOME").map(|p| p.join(".local/state/ashlar")))
            .context(
                "no state directory: neither XDG_STATE_HOME nor HOME is set; use --state DIR",
            )?;
        Ok(StateDir { path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads `cluster.json`; an empty cluster when there is none.
    ///
    /// # Errors
    /// When the file cannot be read or understood.
    pub fn cluster(&self) -> anyhow::Result<Cluster> {
        Ok(read_json(&self.path.join("cluster.json"))?.unwrap_or_default())
    }

    /// Replaces `cluster.json`.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save_cluster(&self, cluster: &Cluster) -> anyhow::Result<()> {
        self.write_json(&self.path.join("cluster.json"), cluster)
    }

    /// The volume called `name`.
    ///
    /// # Errors
    /// When there is none, or its file cannot be understood.
    pub fn volume(&self, name: &str) -> anyhow::Result<VolumeRecord> {
        check_name(name)?;
        read_json(&self.volume_path(name))?.with_context(|| {
            format!(
                "no volume {name:?} in {}; `ashlar volume list` shows those there are",
                self.path.display()
            )
        })
    }

    /// All volumes, by name.
    ///
    /// # Errors
    /// When the directory or a file in it cannot be read.
    pub fn volumes(&self) -> anyhow::Result<Vec<VolumeRecord>> {
        let folder = self.path.join("volumes");
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error).with_context(|| format!("reading {folder:?}")),
        };
        let mut volumes = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "json") {
                volumes.extend(read_json::<VolumeRecord>(&path)?);
            }
        }
        volumes.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(volumes)
    }

    /// Whether a volume of that name is recorded.
    pub fn has_volume(&self, name: &str) -> bool {
        self.volume_path(name).exists()
    }

    /// Writes `volumes/NAME.json`, replacing it.
    ///
    /// # Errors
    /// When the name is not one, or the file cannot be written.
    pub fn save_volume(&self, volume: &VolumeRecord) -> anyhow::Result<()> {
        check_name(&volume.name)?;
        self.write_json(&self.volume_path(&volume.name), volume)
    }

    /// Writes `volumes/NAME.json` of a new volume.
    ///
    /// # Errors
    /// When there is one already, also one that another process has written just now.
    pub fn record_new_volume(&self, volume: &VolumeRecord) -> anyhow::Result<()> {
        check_name(&volume.name)?;
        self.write_json_as(&self.volume_path(&volume.name), volume, |from, to| {
            // Unlike a rename this fails where the file exists.
            let linked = fs::hard_link(from, to);
            fs::remove_file(from)?;
            match linked {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    anyhow::bail!("there is already a volume {:?}", volume.name)
                }
                linked => Ok(linked?),
            }
        })
    }

    /// Removes `volumes/NAME.json`.
    ///
    /// # Errors
    /// When it is there and cannot be removed.
    pub fn forget_volume(&self, name: &str) -> anyhow::Result<()> {
        match fs::remove_file(self.volume_path(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn volume_path(&self, name: &str) -> PathBuf {
        self.path.join("volumes").join(format!("{name}.json"))
    }

    /// Writes beside the file and renames over it, so that a crash leaves the old or the new one.
    fn write_json<T: Serialize>(&self, path: &Path, value: &T) -> anyhow::Result<()> {
        self.write_json_as(path, value, |from, to| Ok(fs::rename(from, to)?))
    }

    /// Writes beside the file and lets `place` put it there.
    fn write_json_as<T: Serialize>(
        &self,
        path: &Path,
        value: &T,
        place: impl Fn(&Path, &Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let attempt = || -> anyhow::Result<()> {
            if let Some(folder) = path.parent() {
                fs::DirBuilder::new()
                    .recursive(true)
                    .mode(0o700)
                    .create(folder)?;
            }
            let temporary = path.with_extension(format!("json.{}", std::process::id()));
            let mut file = fs::OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&temporary)?;
            file.write_all(serde_json::to_string_pretty(value)?.as_bytes())?;
            file.write_all(b"\n")?;
            file.sync_all()?;
            place(&temporary, path)
        };
        attempt().with_context(|| format!("writing {}", path.display()))
    }
}

/// Checks the name of a volume: letters, digits, `-`, `_` and `.`, not at the start a `.`.
///
/// # Errors
/// When it is not one.
pub fn check_name(name: &str) -> anyhow::Result<()> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty()
        || name.len() > NAME_BYTES_MAX
        || name.starts_with('.')
        || !name.chars().all(allowed)
    {
        bail!(
            "{name:?} cannot be the name of a volume: use 1 to {NAME_BYTES_MAX} letters, digits, \
             '-', '_' or '.', not starting with '.'"
        );
    }
    Ok(())
}

fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> anyhow::Result<Option<T>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("reading {}", path.display())),
    };
    serde_json::from_str(&text)
        .map(Some)
        .with_context(|| format!("{} is damaged; correct or remove it", path.display()))
}

impl From<Role> for storage_node::Role {
    fn from(role: Role) -> storage_node::Role {
        match role {
            Role::Data => storage_node::Role::Data,
            Role::Witness => storage_node::Role::Witness,
        }
    }
}

impl From<Ack> for storage_node::Ack {
    fn from(ack: Ack) -> storage_node::Ack {
        match ack {
            Ack::Majority => storage_node::Ack::Majority,
            Ack::All => storage_node::Ack::All,
        }
    }
}

impl MemberRecord {
    /// The member as the control interfaces name it.
    pub fn member(&self) -> storage_node::Member {
        storage_node::Member {
            device_id: self.device_id.clone(),
            nonce: self.nonce,
            role: storage_node::Role::from(self.role).into(),
        }
    }
}

impl VolumeRecord {
    /// What the initiator's attach API is asked for this volume.
    pub fn attach_request(&self) -> initiator::AttachRequest {
        let members = self.members.iter().map(|m| initiator::MemberAddress {
            member: Some(m.member()),
            data_address: m.data_address.clone(),
        });
        initiator::AttachRequest {
            volume_id: self.id.clone(),
            name: self.name.clone(),
            size_bytes: self.size_bytes,
            key: self.key.to_vec(),
            members: members.collect(),
            ack: storage_node::Ack::from(self.ack).into(),
            options: None,
        }
    }

    /// The members that hold blocks.
    pub fn data_members(&self) -> impl Iterator<Item = &MemberRecord> {
        self.members.iter().filter(|m| m.role == Role::Data)
    }
}

mod hex_u64 {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub fn serialize<S: Serializer>(value: &u64, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&format!("{value:016x}"))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
        u64::from_str_radix(&String::deserialize(d)?, 16).map_err(D::Error::custom)
    }
}

mod hex_key {
    use serde::{Deserialize as _, Deserializer, Serializer, de::Error as _};

    pub fn serialize<S: Serializer>(key: &[u8; 32], s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&key.iter().map(|b| format!("{b:02x}")).collect::<String>())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<[u8; 32], D::Error> {
        let text = String::deserialize(d)?;
        let mut key = [0; 32];
        if text.len() != 64 || !text.is_ascii() {
            return Err(D::Error::custom("a key is 64 hexadecimal digits"));
        }
        for (i, byte) in key.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).map_err(D::Error::custom)?;
        }
        Ok(key)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn record(name: &str) -> VolumeRecord {
        VolumeRecord {
            name: name.into(),
            id: "b2a0f2be-0000-4000-8000-000000000001".into(),
            size_bytes: 1 << 30,
            ack: Ack::All,
            key: [0xab; 32],
            members: vec![MemberRecord {
                device_id: "b2a0f2be-0000-4000-8000-000000000002".into(),
                nonce: u64::MAX - 1,
                role: Role::Data,
                control: "127.0.0.1:7000".into(),
                data_address: "tcp:127.0.0.1:7001".into(),
            }],
        }
    }

    #[test]
    fn of_two_volumes_of_one_name_only_the_first_is_recorded() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::new(Some(folder.path().into())).unwrap();
        let first = record("data");
        state.record_new_volume(&first).unwrap();
        let second = VolumeRecord {
            size_bytes: 4096,
            ..record("data")
        };
        let error = state.record_new_volume(&second).unwrap_err();
        assert!(
            format!("{error:#}").contains("there is already a volume"),
            "{error:#}"
        );
        assert_eq!(state.volume("data").unwrap().size_bytes, first.size_bytes);
        assert_eq!(state.volumes().unwrap().len(), 1);
    }

    #[test]
    fn a_saved_volume_comes_back_and_only_its_owner_can_read_its_key() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::new(Some(folder.path().join("state"))).unwrap();
        assert!(state.volumes().unwrap().is_empty());
        state.save_volume(&record("b")).unwrap();
        state.save_volume(&record("a")).unwrap();
        assert_eq!(state.volume("a").unwrap(), record("a"));
        let names: Vec<_> = state
            .volumes()
            .unwrap()
            .into_iter()
            .map(|v| v.name)
            .collect();
        assert_eq!(names, ["a", "b"]);
        let mode = fs::metadata(state.volume_path("a"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
        state.forget_volume("a").unwrap();
        state.forget_volume("a").unwrap();
        assert!(
            state
                .volume("a")
                .unwrap_err()
                .to_string()
                .contains("ashlar volume list")
        );
    }

    #[test]
    fn a_damaged_file_is_named_in_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::new(Some(folder.path().into())).unwrap();
        fs::write(folder.path().join("cluster.json"), "{").unwrap();
        let error = state.cluster().unwrap_err().to_string();
        assert!(
            error.contains("cluster.json") && error.contains("damaged"),
            "{error}"
        );
    }

    #[test]
    fn names_that_would_leave_the_directory_are_refused() {
        for name in [
            "",
            ".",
            "../x",
            "a/b",
            ".hidden",
            "a b",
            "ä",
            &"x".repeat(64),
        ] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        for name in ["a", "db-1", "a.b_C9", &"x".repeat(63)] {
            assert!(check_name(name).is_ok(), "{name:?}");
        }
    }

    #[test]
    fn the_files_have_the_documented_shape() {
        let json = serde_json::to_value(record("a")).unwrap();
        let keys: Vec<_> = json
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        assert_eq!(keys, ["ack", "id", "key", "members", "name", "size_bytes"]);
        assert_eq!(json["ack"], "all");
        assert_eq!(json["members"][0]["nonce"], "fffffffffffffffe");
        assert_eq!(json["key"].as_str().unwrap().len(), 64);
    }
}
