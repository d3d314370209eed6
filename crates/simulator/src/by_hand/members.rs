//! C6: members are replaced, added and removed.

use ashlar_replication::configuration::{Member, Role};
use ashlar_replication::initiator::{ChangeRefusal, Effect, Event, Phase};
use ashlar_replication::message::Request;
use ashlar_replication::values::MemberId;

use super::super::node::Payload;
use super::{Bench, id};

fn is_joint(request: &Request<Payload>) -> bool {
    matches!(request, Request::StoreConfig { configuration, .. } if !configuration.previous.is_empty())
}

impl Bench {
    fn opened(data: usize, witnesses: usize) -> Bench {
        let mut bench = Bench::new(data, witnesses);
        let all: Vec<usize> = (0..data + witnesses).collect();
        bench.attach(&all);
        bench.run();
        bench
    }

    fn change(&mut self, add: Option<(usize, Role)>, remove: Option<usize>) {
        let add = add.map(|(n, role)| Member { id: id(n), role });
        let remove = remove.map(id);
        self.feed(Event::ChangeMembers { add, remove });
    }

    fn members(&self) -> Vec<MemberId> {
        let committed = self.initiator.configuration();
        let members = committed.map(|c| c.members.iter().map(|m| m.id));
        members.into_iter().flatten().collect()
    }

    /// Who was removed by the changes that are done.
    fn removed(&self) -> Vec<Option<MemberId>> {
        let removed = |effect: &Effect<Payload>| match effect {
            Effect::MembersChanged { removed } => Some(*removed),
            _ => None,
        };
        self.out.iter().filter_map(removed).collect()
    }

    fn refusals(&self) -> Vec<ChangeRefusal> {
        let reason = |effect: &Effect<Payload>| match effect {
            Effect::MembersChangeRefused { reason } => Some(*reason),
            _ => None,
        };
        self.out.iter().filter_map(reason).collect()
    }

    fn is_done(&self) -> bool {
        let committed = self.initiator.configuration();
        committed.is_some_and(|c| c.previous.is_empty()) && self.initiator.proposed().is_none()
    }
}

#[test]
fn a_lost_member_is_replaced_by_a_fresh_one() {
    let mut bench = Bench::opened(3, 0);
    bench.write(1, 7);
    bench.lose(2);
    bench.run();
    let fresh = bench.fresh(Role::Data);
    bench.change(Some((fresh, Role::Data)), Some(2));
    bench.run();
    assert!(bench.is_done());
    assert_eq!(bench.members(), [id(0), id(1), id(fresh)]);
    assert_eq!(bench.in_sync(), [id(0), id(1), id(fresh)]);
    assert_eq!(bench.removed(), [Some(id(2))]);
    assert_eq!(bench.block_of(fresh), bench.block_of(0));
    bench.write(2, 8);
    bench.run();
    assert_eq!(bench.result(2), Some(Ok(())));
    // Whoever is told of the old members only finds the new one.
    bench.attach(&[1, fresh]);
    bench.run();
    assert_eq!(bench.read(), Some(8));
    assert_eq!(bench.in_sync(), [id(1), id(fresh)]);
}

#[test]
fn a_member_that_is_in_sync_is_replaced_and_leaves_in_the_same_configuration() {
    let mut bench = Bench::opened(3, 0);
    bench.write(1, 7);
    let fresh = bench.fresh(Role::Data);
    bench.change(Some((fresh, Role::Data)), Some(0));
    bench.run_until(|_, request| is_joint(request));
    let proposed = bench.initiator.proposed().expect("a change is proposed");
    assert_eq!(proposed.in_sync, [id(1), id(2), id(fresh)]);
    assert_eq!(bench.removed(), []);
    bench.write(2, 8);
    bench.run();
    assert_eq!(bench.result(2), Some(Ok(())));
    assert!(bench.is_done());
    assert_eq!(bench.removed(), [Some(id(0))]);
    assert_eq!(bench.read(), Some(8));
}

#[test]
fn a_data_member_is_added_and_writes_need_one_more() {
    let mut bench = Bench::opened(1, 0);
    bench.write(1, 7);
    for fresh in [1, 2] {
        assert_eq!(bench.fresh(Role::Data), fresh);
        bench.change(Some((fresh, Role::Data)), None);
        bench.run();
        assert!(bench.is_done());
    }
    assert_eq!(bench.removed(), [None, None]);
    let c = bench.initiator.configuration().expect("it is open");
    assert_eq!((c.write_quorum(), c.recovery_quorum()), (2, 2));
    bench.lose(0);
    bench.write(2, 8);
    bench.run();
    assert_eq!(bench.result(2), Some(Ok(())));
    assert_eq!(bench.read(), Some(8));
}

#[test]
fn a_member_is_removed_and_writes_need_one_less() {
    let mut bench = Bench::opened(3, 0);
    bench.write(1, 7);
    bench.change(None, Some(1));
    bench.run();
    bench.change(None, Some(0));
    bench.run();
    assert_eq!(bench.removed(), [Some(id(1)), Some(id(0))]);
    assert_eq!(bench.members(), [id(2)]);
    bench.write(2, 8);
    bench.run();
    assert_eq!(bench.result(2), Some(Ok(())));
    // The last one stays.
    bench.change(None, Some(2));
    bench.run();
    assert_eq!(bench.refusals(), [ChangeRefusal::NoDataMember]);
}

#[test]
fn a_witness_is_replaced_by_a_data_member_and_back() {
    let mut bench = Bench::opened(2, 1);
    bench.write(1, 7);
    let data = bench.fresh(Role::Data);
    bench.change(Some((data, Role::Data)), Some(2));
    bench.run();
    assert_eq!(bench.in_sync(), [id(0), id(1), id(data)]);
    assert_eq!(bench.block_of(data), bench.block_of(0));
    let witness = bench.fresh(Role::Witness);
    bench.change(Some((witness, Role::Witness)), Some(0));
    bench.run();
    assert_eq!(bench.members(), [id(1), id(data), id(witness)]);
    assert_eq!(bench.in_sync(), [id(1), id(data)]);
    bench.attach(&[data, witness]);
    bench.run();
    assert_eq!(bench.initiator.phase(), Phase::Fencing, "nobody it knows");
    bench.reach(1);
    bench.run();
    assert_eq!(bench.read(), Some(7));
}

/// The initiator dies when everybody has stored the change and it has not heard of it.
#[test]
fn an_attach_finishes_the_change_that_it_finds() {
    let mut bench = Bench::opened(3, 0);
    bench.write(1, 7);
    bench.run();
    let fresh = bench.fresh(Role::Data);
    bench.change(Some((fresh, Role::Data)), Some(2));
    let mut stored = 0;
    bench.run_until(|_, request| {
        stored += usize::from(is_joint(request));
        stored == 4
    });
    // A majority of the new members is not enough, nor is one of the previous ones.
    for reached in [[1, fresh], [1, 2]] {
        bench.attach(&reached);
        bench.run();
        assert_eq!(bench.initiator.phase(), Phase::Fencing, "over {reached:?}");
    }
    bench.attach(&[0, 1]);
    bench.run();
    assert_eq!(bench.initiator.phase(), Phase::Open);
    assert!(bench.is_done());
    assert_eq!(bench.removed(), [Some(id(2))]);
    assert_eq!(bench.members(), [id(0), id(1), id(fresh)]);
    bench.reach(fresh);
    bench.run();
    assert_eq!(bench.in_sync(), [id(0), id(1), id(fresh)]);
    assert_eq!(bench.read(), Some(7));
}

/// Holes 5. The change from A B C to A B D is stored on A alone; the next initiator does not see it and
/// writes; the one after finds A and D, a majority of the new members.
fn attach_over_the_new_members() -> Bench {
    let mut bench = Bench::opened(3, 0);
    bench.write(1, 7);
    bench.run();
    let fresh = bench.fresh(Role::Data);
    bench.change(Some((fresh, Role::Data)), Some(2));
    bench.run_until(|n, request| n == 0 && is_joint(request));
    bench.attach(&[1, 2]);
    bench.run();
    bench.write(2, 8);
    bench.run();
    assert_eq!(bench.result(2), Some(Ok(())));
    bench.attach(&[0, fresh]);
    bench.run();
    bench
}

#[test]
fn a_change_that_is_found_needs_a_majority_of_the_previous_members_too() {
    let mut bench = attach_over_the_new_members();
    assert_eq!(bench.initiator.phase(), Phase::Fencing);
    bench.reach(1);
    bench.run();
    assert_eq!(bench.read(), Some(8));
}

#[cfg(feature = "faults")]
#[test]
fn without_that_majority_an_acknowledged_write_is_lost() {
    use ashlar_replication::faults::{Fault, break_rule};
    break_rule(Some(Fault::AttachSingle));
    let mut bench = attach_over_the_new_members();
    let read = bench.read();
    break_rule(None);
    assert_eq!(read, Some(7), "write 2 was acknowledged");
}

#[test]
fn a_change_that_is_none_is_refused() {
    let mut bench = Bench::opened(3, 0);
    let fresh = bench.fresh(Role::Data);
    bench.change(None, None);
    bench.change(None, Some(fresh));
    bench.change(Some((1, Role::Data)), Some(0));
    bench.reached.retain(|n| *n != fresh);
    bench.change(Some((fresh, Role::Data)), Some(0));
    bench.change(None, Some(1));
    bench.run();
    bench.feed(Event::CancelChange);
    bench.run();
    use ChangeRefusal::{Cancelled, Duplicate, Nothing, TooFewInSync, Unknown};
    let all = [
        Nothing,
        Unknown,
        Duplicate,
        ChangeRefusal::UnderWay,
        Cancelled,
    ];
    assert_eq!(bench.refusals(), all);
    // A witness for one of two members in sync, where writes need two.
    bench.lose(2);
    bench.run();
    bench.out.clear();
    let witness = bench.fresh(Role::Witness);
    bench.options.min_in_sync = Some(2);
    bench.attach(&[0, 1]);
    bench.change(None, Some(1));
    bench.run();
    bench.change(Some((witness, Role::Witness)), Some(1));
    bench.run();
    assert_eq!(bench.refusals(), [ChangeRefusal::NotOpen, TooFewInSync]);
}

#[test]
fn members_are_replaced_again_and_again_in_one_epoch() {
    let mut bench = Bench::opened(3, 0);
    for round in 0..40 {
        bench.write(round, round + 1);
        let fresh = bench.fresh(Role::Data);
        bench.change(Some((fresh, Role::Data)), Some(fresh - 3));
        bench.run();
        assert_eq!(bench.removed().len() as u64, round + 1);
        assert_eq!(bench.read(), Some(round + 1));
        assert_eq!(bench.block_of(fresh), bench.block_of(fresh - 1));
    }
    assert_eq!(bench.initiator.status().members.len(), 3);
}
