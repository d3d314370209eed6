//! The journal: a ring of records. One is written at a time; everything that waits goes into the next.

pub(crate) mod descriptor;
pub(crate) mod record;
pub(crate) mod ring;

#[cfg(test)]
mod tests;
