//! Schedules with a plot.
