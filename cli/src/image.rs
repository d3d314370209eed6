//! A filesystem image with real content, to put on a volume.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

use crate::bench::noise;

/// Folders that a machine usually has, readable by everybody, of a few megabytes.
const FOLDERS: [&str; 4] = [
    "/usr/share/zoneinfo",
    "/usr/share/perl5",
    "/usr/share/doc",
    "/usr/share/mime",
];
/// Entries looked at before a folder counts as too large.
const ENTRIES_MAX: usize = 20_000;

/// An image in a file.
#[derive(Debug)]
pub struct Image {
    /// Where it is.
    pub path: PathBuf,
    /// How it was made, for people.
    pub origin: String,
    /// Whether it is a filesystem.
    pub is_ext4: bool,
}

/// Makes an ext4 image of `size_bytes` in `folder`, with the content of a real folder; without
/// mke2fs an image of generated data.
///
/// # Errors
/// When neither can be made.
pub fn make(folder: &Path, size_bytes: u64) -> anyhow::Result<Image> {
    let path = folder.join("image");
    let Some(mke2fs) = tool("mke2fs") else {
        generate(&path, size_bytes)?;
        let origin = "generated data, because mke2fs is not installed (package e2fsprogs)".into();
        return Ok(Image {
            path,
            origin,
            is_ext4: false,
        });
    };
    let source = match FOLDERS
        .iter()
        .map(Path::new)
        .find(|f| fits(f, size_bytes / 4 * 3))
    {
        Some(source) => source.to_owned(),
        None => generate_folder(folder, size_bytes)?,
    };
    let output = Command::new(&mke2fs)
        .args(["-q", "-F", "-t", "ext4", "-L", "ashlar", "-d"])
        .arg(&source)
        .arg(&path)
        .arg(format!("{}k", size_bytes / 1024))
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("running {}", mke2fs.display()))?;
    ensure!(
        output.status.success(),
        "{} failed: {}",
        mke2fs.display(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let origin = format!("ext4 by mke2fs -d {}", source.display());
    Ok(Image {
        path,
        origin,
        is_ext4: true,
    })
}

/// Checks an ext4 image with `e2fsck -fn`. `None` when e2fsck is not installed.
///
/// # Errors
/// When it does not run.
pub fn check(path: &Path) -> anyhow::Result<Option<bool>> {
    let Some(e2fsck) = tool("e2fsck") else {
        return Ok(None);
    };
    let mut command = Command::new(e2fsck);
    command
        .arg("-fn")
        .arg(path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    Ok(Some(command.status()?.success()))
}

/// A program in `PATH` or where system programs lie, which is not in everybody's `PATH`.
fn tool(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders
        .map(|folder| folder.join(name))
        .find(|program| program.is_file())
}

/// Whether the files below `folder` can all be read and need at most `bytes_max`, and something.
fn fits(folder: &Path, bytes_max: u64) -> bool {
    let mut folders = vec![folder.to_owned()];
    let (mut bytes, mut entries) = (0, 0);
    while let Some(folder) = folders.pop() {
        let Ok(list) = fs::read_dir(&folder) else {
            return false;
        };
        for entry in list {
            let Ok(entry) = entry else { return false };
            let Ok(metadata) = entry.metadata() else {
                return false;
            };
            entries += 1;
            if metadata.is_dir() {
                folders.push(entry.path());
            } else if metadata.is_file() {
                if File::open(entry.path()).is_err() {
                    return false;
                }
                bytes += metadata.len().next_multiple_of(4096);
            }
            if bytes > bytes_max || entries > ENTRIES_MAX {
                return false;
            }
        }
    }
    bytes >= 256 * 1024
}

/// Noise and holes, a quarter of the size in noise.
fn generate(path: &Path, size_bytes: u64) -> anyhow::Result<()> {
    let file = File::create(path)?;
    file.set_len(size_bytes)?;
    let chunk = noise(256 * 1024, size_bytes);
    for offset in (0..size_bytes).step_by(1 << 20) {
        let len = (size_bytes - offset).min(chunk.len() as u64);
        file.write_all_at(&chunk[..len as usize], offset)?;
        file.write_all_at(&offset.to_le_bytes()[..len.min(8) as usize], offset)?;
    }
    Ok(())
}

fn generate_folder(parent: &Path, size_bytes: u64) -> anyhow::Result<PathBuf> {
    let folder = parent.join("image-content");
    fs::create_dir(&folder)?;
    for i in 0..16 {
        generate(&folder.join(format!("file-{i}")), size_bytes / 32)?;
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_made_and_is_sound_where_the_tools_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let image = make(folder.path(), 16 << 20).unwrap();
        assert_eq!(fs::metadata(&image.path).unwrap().len(), 16 << 20);
        if image.is_ext4 {
            assert_ne!(check(&image.path).unwrap(), Some(false));
        } else {
            assert!(image.origin.contains("e2fsprogs"));
        }
    }

    #[test]
    fn generated_data_has_the_size_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        generate(&path, (1 << 20) + 3).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), (1 << 20) + 3);
    }

    #[test]
    fn a_folder_that_is_too_large_or_missing_or_empty_does_not_fit() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!fits(folder.path(), 1 << 30));
        assert!(!fits(Path::new("/does/not/exist"), 1 << 30));
        fs::write(folder.path().join("a"), vec![1; 300 * 1024]).unwrap();
        assert!(fits(folder.path(), 1 << 30));
        assert!(!fits(folder.path(), 100 * 1024));
    }
}
