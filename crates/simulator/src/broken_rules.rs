//! The proof that the schedules find what is wrong: each rule is broken in turn.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ashlar_replication::faults::{Fault, break_rule};
use ashlar_store::faults::{Fault as StoreFault, leave_undone};

use super::chaos::{Media, run};
use super::schedules::number;

/// Schedules after which a broken rule must have been found.
const SCHEDULES_TO_FIND: u64 = 40_000;

/// `hint`: a seed that found it once. It is tried first, and goes stale with every change of the schedules.
fn is_found(fault: Fault, hint: u64) -> Option<(u64, String)> {
    break_rule(Some(fault));
    let hook = std::panic::take_hook();
    let limit = number("ASHLAR_SCHEDULES_TO_FIND").unwrap_or(SCHEDULES_TO_FIND);
    let mut found = None;
    for seed in core::iter::once(hint).chain(0..limit) {
        match catch_unwind(AssertUnwindSafe(|| run(seed, Media::Model))) {
            Ok(Ok(_)) => continue,
            Ok(Err(violation)) => found = Some((seed, violation)),
            Err(_) => found = Some((seed, "a broken invariant panicked".into())),
        }
        break;
    }
    std::panic::set_hook(hook);
    break_rule(None);
    found
}

macro_rules! finds {
    ($($name:ident: $fault:ident $hint:literal,)*) => {$(
        #[test]
        fn $name() {
            let found = is_found(Fault::$fault, $hint);
            let (seed, violation) = found.expect("the broken rule was not found");
            println!("{:?} at seed {seed}: {violation}", Fault::$fault);
        }
    )*};
}

finds! {
    finds_a_write_acknowledged_on_one_member: AcknowledgeOnOne 0,
    finds_a_shrink_that_leaves_an_acknowledged_write_behind: ProposeUnguarded 23,
    finds_an_acknowledgement_by_the_old_quorum_alone: OldQuorumOnly 34,
    finds_an_acknowledgement_by_the_new_quorum_alone: NewQuorumOnly 0,
    finds_reads_from_a_member_that_is_being_dropped: ReadLeaving 104,
    finds_a_lease_that_was_not_waited_for: NoLeaseWait 72,
    finds_absent_members_kept_in_sync: KeepAbsent 2,
    finds_equalising_by_last_alone: EqualiseByLast 3771,
    finds_last_moved_before_the_blocks: LastFirst 8,
    finds_a_tail_that_was_not_rolled_back: KeepTail 4838,
    finds_configurations_ordered_by_generation_alone: GenerationOnly 1285,
    finds_two_initiators_with_one_epoch: EqualEpoch 0,
    finds_a_promise_forgotten_in_a_crash: ForgetPromise 1193,
    finds_messages_of_older_epochs_accepted: OldEpochs 113,
    finds_a_gap_jumped_over: AcceptGap 14,
    finds_copies_that_overwrite_newer_writes: AnyExpected 2,
    finds_a_lease_counted_from_the_answer: LeaseFromAnswer 9881,
    finds_reads_without_a_lease: NoLease 750,
    finds_renewals_answered_to_anybody: RenewAnybody 2920,
    finds_reads_of_writes_that_then_vanish: ReadUnacknowledged 0,
    finds_reads_from_a_member_that_lags: ReadLagging 7,
    finds_a_resync_from_a_source_that_lags: LaggingSource 23,
    finds_a_resync_that_rolls_new_writes_back: SourceWins 13,
    finds_a_member_proposed_too_early: ProposeEarly 0,
    finds_a_configuration_sent_in_any_order: AnyOrder 0,
    finds_a_torn_block_kept_with_its_position: KeepTorn 1271,
    finds_a_sequence_taken_back_that_somebody_holds: TakeBackAlways 14,
    finds_found_members_that_are_not_fenced: ForgetFound 39,
    finds_previous_members_ignored_by_an_attach: AttachSingle 7469,
    finds_a_change_committed_by_the_new_members_alone: CommitSingle 99,
    finds_members_changed_at_once: ChangeAtOnce 99,
    finds_data_dropped_before_the_change_is_over: DropEarly 1627,
    finds_a_repair_from_another_position: RepairAnyPosition 2959,
}

/// Seeds on the real store within which a duty left undone must be found; the rarest one needs some thousands.
const STORE_SEEDS_TO_FIND: u64 = 20_000;

fn is_found_on_store(fault: StoreFault) -> Option<(u64, String)> {
    leave_undone(Some(fault));
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let mut found = None;
    for seed in 0..STORE_SEEDS_TO_FIND {
        match catch_unwind(AssertUnwindSafe(|| run(seed, Media::Store))) {
            Ok(Ok(_)) => continue,
            Ok(Err(violation)) => found = Some((seed, violation)),
            Err(_) => found = Some((seed, "a broken invariant panicked".into())),
        }
        break;
    }
    std::panic::set_hook(hook);
    leave_undone(None);
    found
}

macro_rules! finds_on_store {
    ($($name:ident: $fault:ident,)*) => {$(
        #[test]
        fn $name() {
            let found = is_found_on_store(StoreFault::$fault);
            let (seed, violation) = found.expect("what was left undone was not found");
            println!("{:?} at seed {seed}: {violation}", StoreFault::$fault);
        }
    )*};
}

finds_on_store! {
    finds_an_acknowledgement_before_the_sync: AcknowledgeBeforeSync,
    finds_extent_headers_that_are_not_checked: SkipHeaderChecksum,
    finds_a_journal_tail_that_moves_early: MoveTailEarly,
    finds_an_index_that_is_believed_after_a_crash: TrustIndex,
    finds_a_discard_that_loses_its_position: LoseDiscardPosition,
    finds_a_torn_block_taken_for_what_was_written: ReuseTornPosition,
    finds_a_torn_block_that_is_skipped: SkipTorn,
}
