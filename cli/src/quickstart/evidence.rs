//! The image on the volume: written there, read back, compared.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::{Context as _, ensure};
use indicatif::ProgressBar;

use crate::nbd::{self, Command, NbdClient};

const CHUNK_BYTES: usize = 1 << 20;
/// Requests in flight while the image is copied.
const DEPTH: usize = 4;

/// Copies the image to the start of the volume; chunks of zeros are left out, as the volume is new.
/// Returns the bytes written.
///
/// # Errors
/// When the file cannot be read or a write fails.
pub fn copy_in(client: &mut NbdClient, image: &Path, bar: &ProgressBar) -> anyhow::Result<u64> {
    let file = File::open(image)?;
    let size = file.metadata()?.len();
    let mut chunk = vec![0; CHUNK_BYTES];
    let (mut in_flight, mut written) = (0, 0);
    let acknowledge = |client: &mut NbdClient| -> anyhow::Result<()> {
        let reply = client.reply().context("writing the image")?;
        nbd::check(reply).context("writing the image")
    };
    for offset in (0..size).step_by(CHUNK_BYTES) {
        let length = (size - offset).min(CHUNK_BYTES as u64) as usize;
        file.read_exact_at(&mut chunk[..length], offset)?;
        bar.set_position(offset);
        if chunk[..length].iter().all(|byte| *byte == 0) {
            continue;
        }
        if in_flight == DEPTH {
            acknowledge(client)?;
            in_flight -= 1;
        }
        client.send(
            Command::Write,
            offset,
            offset,
            length as u32,
            &chunk[..length],
        )?;
        in_flight += 1;
        written += length as u64;
    }
    for _ in 0..in_flight {
        acknowledge(client)?;
    }
    client.flush().context("flushing the image")?;
    Ok(written)
}

/// Reads the image back into `copy` and compares it with the original.
///
/// # Errors
/// When a read fails or a byte differs.
pub fn read_back(
    client: &mut NbdClient,
    image: &Path,
    copy: &Path,
    bar: &ProgressBar,
) -> anyhow::Result<()> {
    let original = File::open(image)?;
    let size = original.metadata()?.len();
    let copy = File::create(copy)?;
    let (mut expected, mut got) = (vec![0; CHUNK_BYTES], vec![0; CHUNK_BYTES]);
    for offset in (0..size).step_by(CHUNK_BYTES) {
        let length = (size - offset).min(CHUNK_BYTES as u64) as usize;
        original.read_exact_at(&mut expected[..length], offset)?;
        client
            .read_at(offset, &mut got[..length])
            .context("reading the image back")?;
        copy.write_all_at(&got[..length], offset)?;
        let differs = expected[..length]
            .iter()
            .zip(&got[..length])
            .position(|(a, b)| a != b);
        ensure!(
            differs.is_none(),
            "the image differs at byte {}",
            offset + differs.unwrap_or(0) as u64
        );
        bar.set_position(offset);
    }
    Ok(())
}
