//! What other programs leave on a device: nothing that carries one of these is ever formatted.

use std::fmt;
use std::io;

use ashlar_engine::IoBuf;
use ashlar_replication::values::DeviceId;

use crate::device::{Device, Part};
use crate::format::layout::SUPERBLOCK_B_OFFSET;
use crate::format::page::PAGE;
use crate::format::superblock;

/// What was found on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Signature {
    /// A store or journal of ours, also a damaged or newer one.
    Ashlar(Option<DeviceId>),
    /// Something else, by its common name.
    Foreign(&'static str),
    /// Bytes that are not zero where a blank device has zeros.
    Data,
}

impl Signature {
    /// Whether it is a store or journal of ours.
    pub fn is_ours(&self) -> bool {
        matches!(self, Signature::Ashlar(_))
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Signature::Ashlar(Some(device)) => write!(f, "an Ashlar store ({device})"),
            Signature::Ashlar(None) => f.write_str("a damaged or newer Ashlar store"),
            Signature::Foreign(name) => f.write_str(name),
            Signature::Data => f.write_str("data that is not zero"),
        }
    }
}

/// Bytes at the start of a device that are looked at; the farthest signature known (btrfs) lies at 64 KiB.
pub const HEAD_BYTES: usize = 256 << 10;
/// Bytes at the end: GPT's second header, ZFS labels, RAID superblocks.
pub const TAIL_BYTES: usize = 256 << 10;

/// (name, offset, bytes) from the start of the device.
const HEAD_MAGICS: &[(&str, usize, &[u8])] = &[
    ("an ext2, ext3 or ext4 filesystem", 0x438, &[0x53, 0xef]),
    ("an XFS filesystem", 0, b"XFSB"),
    ("a btrfs filesystem", 0x10040, b"_BHRfS_M"),
    ("a GPT partition table", 512, b"EFI PART"),
    ("a GPT partition table", 4096, b"EFI PART"),
    ("an LVM physical volume", 0x218, b"LVM2 001"),
    ("an LVM physical volume", 0x018, b"LVM2 001"),
    ("an LVM physical volume", 0x418, b"LVM2 001"),
    ("an LVM physical volume", 0x618, b"LVM2 001"),
    ("a LUKS encrypted volume", 0, b"LUKS\xba\xbe"),
    ("a LUKS encrypted volume", 0x4000, b"SKUL\xba\xbe"),
    ("swap space", 4086, b"SWAPSPACE2"),
    ("swap space", 4086, b"SWAP-SPACE"),
    ("swap space", 16374, b"SWAPSPACE2"),
    ("swap space", 65526, b"SWAPSPACE2"),
    ("an NTFS filesystem", 3, b"NTFS    "),
    ("an exFAT filesystem", 3, b"EXFAT   "),
    ("a FAT filesystem", 0x36, b"FAT1"),
    ("a FAT filesystem", 0x52, b"FAT32"),
    ("an ISO 9660 filesystem", 0x8001, b"CD001"),
    ("an F2FS filesystem", 0x400, &[0x10, 0x20, 0xf5, 0xf2]),
    ("a bcachefs filesystem", 0x1018, &[0xc6, 0x85, 0x73, 0xf6]),
    ("a squashfs filesystem", 0, b"hsqs"),
    ("a Ceph BlueStore device", 0, b"bluestore block device"),
    ("a RAID member", 0x1000, &[0xfc, 0x4e, 0x2b, 0xa9]),
    ("a RAID member", 0, &[0xfc, 0x4e, 0x2b, 0xa9]),
    ("an erofs filesystem", 0x400, &[0xe2, 0xe1, 0xf5, 0xe0]),
    ("a DRBD or OCFS2 volume", 0x2000, b"OCFSV2"),
];

/// Looks for signatures in the first and the last bytes of a device ([`HEAD_BYTES`], [`TAIL_BYTES`]; the
/// tail ends where the device ends).
pub fn detect(head: &[u8], tail: &[u8]) -> Option<Signature> {
    ours(head).or_else(|| foreign(head, tail)).or_else(|| {
        let blank = head.iter().chain(tail).all(|byte| *byte == 0);
        (!blank).then_some(Signature::Data)
    })
}

fn ours(head: &[u8]) -> Option<Signature> {
    let mut damaged = false;
    for offset in [0, SUPERBLOCK_B_OFFSET as usize] {
        let Some(page) = head.get(offset..offset + PAGE) else {
            continue;
        };
        for magic in [superblock::MAGIC, superblock::JOURNAL_MAGIC] {
            match superblock::decode(page, magic) {
                superblock::Found::Superblock { device, .. } => {
                    return Some(Signature::Ashlar(Some(device)));
                }
                superblock::Found::Foreign => {}
                _ => damaged = true,
            }
        }
    }
    damaged.then_some(Signature::Ashlar(None))
}

fn has(bytes: &[u8], offset: usize, magic: &[u8]) -> bool {
    bytes.get(offset..offset + magic.len()) == Some(magic)
}

fn foreign(head: &[u8], tail: &[u8]) -> Option<Signature> {
    let magics = HEAD_MAGICS
        .iter()
        .find(|(_, offset, magic)| has(head, *offset, magic));
    if let Some((name, _, _)) = magics {
        return Some(Signature::Foreign(name));
    }
    if is_zfs(head) || is_zfs(tail) {
        return Some(Signature::Foreign("a ZFS pool member"));
    }
    let ends_with_gpt = [512, 4096]
        .iter()
        .any(|block| tail.len() >= *block && has(tail, tail.len() - block, b"EFI PART"));
    if ends_with_gpt {
        return Some(Signature::Foreign("a GPT partition table"));
    }
    // RAID superblock 1.0 lies 8 KiB before the end, rounded; 0.90 64 KiB before it.
    let raid = [0xfc, 0x4e, 0x2b, 0xa9];
    if tail.chunks_exact(PAGE).any(|page| page.starts_with(&raid)) {
        return Some(Signature::Foreign("a RAID member"));
    }
    has(head, 510, &[0x55, 0xaa])
        .then_some(Signature::Foreign("an MBR partition table or boot sector"))
}

/// A ZFS label is 256 KiB with an array of uberblocks in its second half, in either byte order.
fn is_zfs(label: &[u8]) -> bool {
    let magic = 0x00ba_b10c_u64;
    label.get(128 << 10..).is_some_and(|uberblocks| {
        uberblocks
            .chunks_exact(1024)
            .any(|block| block[..8] == magic.to_le_bytes() || block[..8] == magic.to_be_bytes())
    })
}

/// Looks at a part of a device.
pub(crate) fn detect_on<D: Device>(dev: &mut D, part: Part) -> io::Result<Option<Signature>> {
    let Some(geometry) = dev.geometry(part) else {
        return Ok(None);
    };
    let size = geometry.size_bytes / PAGE as u64 * PAGE as u64;
    let head_bytes = size.min(HEAD_BYTES as u64);
    let tail_bytes = (size - head_bytes).min(TAIL_BYTES as u64);
    let mut head = IoBuf::new(head_bytes as usize);
    let mut tail = IoBuf::new(tail_bytes as usize);
    if head_bytes > 0 {
        dev.read_blocking(part, 0, &mut head)?;
    }
    if tail_bytes > 0 {
        dev.read_blocking(part, size - tail_bytes, &mut tail)?;
    }
    Ok(detect(&head, &tail))
}
