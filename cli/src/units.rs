//! Sizes, rates and durations as people write and read them.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes, written as `4096`, `4k`, `64KiB`, `1M`, `2G`, `1T`. All units are powers of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

/// Why a text is not a [`Size`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SizeError(String);

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is not a size; write it like 4k, 512M or 10G",
            self.0
        )
    }
}

impl std::error::Error for SizeError {}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Size, SizeError> {
        let error = || SizeError(text.to_owned());
        let text = text.trim();
        let digits = text
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len());
        let number: u64 = text[..digits].parse().map_err(|_| error())?;
        let shift = match text[digits..].trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(error()),
        };
        number.checked_mul(1 << shift).map(Size).ok_or_else(error)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < units.len() {
            value /= 1024.0;
            unit += 1;
        }
        let text = if value.fract() == 0.0 {
            format!("{value:.0} {}", units[unit])
        } else {
            format!("{value:.1} {}", units[unit])
        };
        f.pad(&text)
    }
}

/// A duration as "71 µs", "4.2 ms" or "1.30 s".
pub fn duration_text(duration: Duration) -> String {
    micros_text(duration.as_secs_f64() * 1e6)
}

/// Microseconds as "71 µs", "4.2 ms" or "1.30 s".
pub fn micros_text(micros: f64) -> String {
    match micros {
        m if m < 10.0 => format!("{m:.1} µs"),
        m if m < 1_000.0 => format!("{m:.0} µs"),
        m if m < 100_000.0 => format!("{:.1} ms", m / 1e3),
        m if m < 1_000_000.0 => format!("{:.0} ms", m / 1e3),
        m => format!("{:.2} s", m / 1e6),
    }
}

/// A count with thousands separated: "12,345".
pub fn count_text(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_every_common_spelling() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4k", 4096),
            ("4K", 4096),
            ("64KiB", 65536),
            ("1M", 1 << 20),
            ("2 GiB", 2 << 30),
            ("1T", 1 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_an_example() {
        for text in ["", "k", "4x", "-1", "1.5G", "99999999999T", "4 k k"] {
            let error = text.parse::<Size>().unwrap_err().to_string();
            assert!(error.contains("write it like 4k"), "{error}");
        }
    }

    #[test]
    fn numbers_are_printed_for_people() {
        assert_eq!(Size(4096).to_string(), "4 KiB");
        assert_eq!(Size(1536 << 20).to_string(), "1.5 GiB");
        assert_eq!(count_text(0), "0");
        assert_eq!(count_text(1_234_567), "1,234,567");
        assert_eq!(micros_text(71.4), "71 µs");
        assert_eq!(duration_text(Duration::from_micros(4_200)), "4.2 ms");
        assert_eq!(duration_text(Duration::from_millis(1_300)), "1.30 s");
    }
}
