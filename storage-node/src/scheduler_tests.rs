//! Shares over simulated time.

use super::*;

const MS: u64 = 1_000_000;

/// A device that serves `rate` cost per second, one request at a time, with classes that always have
/// `depth` requests waiting. Returns what each class got, in cost per second.
fn run(shares: &[Shares], depth: usize, cost: Cost, rate: f64, seconds: u64) -> Vec<f64> {
    let mut scheduler = Scheduler::new(Cost(1));
    let classes: Vec<_> = shares.iter().map(|s| scheduler.add_class(*s)).collect();
    let mut served = vec![0.0; classes.len()];
    let mut now = Time(MS);
    let end = Time(seconds * 1000 * MS);
    for class in &classes {
        (0..depth).for_each(|_| scheduler.enqueue(*class, cost, ()));
    }
    while now < end {
        match scheduler.dispatch(now) {
            Some((class, cost, ())) => {
                served[class.0 as usize] += cost.0 as f64;
                now = now + Duration::from_secs_f64(cost.0 as f64 / rate);
                scheduler.finished(cost);
                scheduler.enqueue(class, cost, ());
            }
            None => now = now.max(scheduler.next_time()) + Duration::from_nanos(1),
        }
    }
    served.iter().map(|s| s / seconds as f64).collect()
}

fn close(is: f64, wanted: f64) {
    assert!(
        (is - wanted).abs() < wanted * 0.05,
        "{is} is not about {wanted}"
    );
}

#[test]
fn weights_share_a_busy_device() {
    let shares = |weight| Shares {
        weight,
        ..Shares::default()
    };
    let got = run(
        &[shares(1.0), shares(3.0)],
        4,
        Cost::of_bytes(4096),
        1e8,
        10,
    );
    close(got[1] / got[0], 3.0);
    close(got[0] + got[1], 1e8);
}

#[test]
fn a_limit_holds_and_the_rest_goes_to_the_others() {
    let limited = Shares {
        limit: 1e7,
        weight: 10.0,
        ..Shares::default()
    };
    let got = run(
        &[limited, Shares::default()],
        4,
        Cost::of_bytes(4096),
        1e8,
        10,
    );
    close(got[0], 1e7);
    close(got[1], 9e7);
}

#[test]
fn a_reservation_is_served_before_weights() {
    let reserved = Shares {
        reservation: 4e7,
        weight: 0.001,
        ..Shares::default()
    };
    let heavy = Shares {
        weight: 100.0,
        ..Shares::default()
    };
    let got = run(&[reserved, heavy], 4, Cost::of_bytes(4096), 1e8, 10);
    close(got[0], 4e7);
}

/// Operations a second of a client at depth 1 with a limit that is split evenly over so many queues,
/// among which its operations fall by chance, as they do by their place or by the CPU they come from.
fn rate_at_depth_one(queues: usize, limit_per_second: f64, cost: Cost) -> f64 {
    let shares = Shares {
        limit: limit_per_second * cost.0 as f64 / queues as f64,
        ..Shares::default()
    };
    let mut all: Vec<Scheduler<()>> = (0..queues).map(|_| Scheduler::new(Cost(1))).collect();
    let class = ClassId(0);
    all.iter_mut()
        .for_each(|s| assert_eq!(s.add_class(shares), class));
    let (seconds, mut now, mut done, mut random) = (20, Time(MS), 0, 1u64);
    while now < Time(seconds * 1000 * MS) {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let scheduler = &mut all[(random >> 33) as usize % queues];
        if !scheduler.admit(now, class, cost) {
            scheduler.enqueue(class, cost, ());
            while scheduler.dispatch(now).is_none() {
                now = now.max(scheduler.next_time()) + Duration::from_nanos(1);
            }
        }
        now = now + Duration::from_micros(200);
        scheduler.finished(cost);
        done += 1;
    }
    f64::from(done) / seconds as f64
}

#[test]
fn one_queue_gives_a_client_at_depth_one_its_whole_limit_where_several_halve_it() {
    // The case of design §6: 240 operations of 200 KiB a second, 5 queues.
    let cost = Cost::of_bytes(200 << 10);
    close(rate_at_depth_one(1, 240.0, cost), 240.0);
    let split = rate_at_depth_one(5, 240.0, cost);
    assert!((100.0..160.0).contains(&split), "{split}");
}

#[test]
fn cost_counts_bytes_so_large_requests_do_not_crowd_out_small_ones() {
    let mut scheduler = Scheduler::new(Cost(1));
    let small = scheduler.add_class(Shares::default());
    let large = scheduler.add_class(Shares::default());
    for _ in 0..5000 {
        scheduler.enqueue(small, Cost::of_bytes(4096), ());
        scheduler.enqueue(large, Cost::of_bytes(1 << 20), ());
    }
    let mut bytes = [0; 2];
    for _ in 0..4000 {
        let (class, cost, ()) = scheduler.dispatch(Time(MS)).unwrap();
        bytes[class.0 as usize] += cost.0;
        scheduler.finished(cost);
    }
    close(bytes[0] as f64, bytes[1] as f64);
}

#[test]
fn an_idle_device_lets_a_request_straight_through_and_a_full_one_does_not() {
    let mut scheduler: Scheduler<u32> = Scheduler::new(Cost::of_bytes(4096));
    let class = scheduler.add_class(Shares::default());
    let cost = Cost::of_bytes(4096);
    assert!(scheduler.admit(Time(MS), class, cost));
    assert!(!scheduler.admit(Time(MS), class, cost));
    scheduler.enqueue(class, cost, 7);
    assert_eq!(scheduler.dispatch(Time(MS)), None);
    scheduler.finished(cost);
    assert!(
        !scheduler.admit(Time(MS), class, cost),
        "overtakes a request that waits"
    );
    assert_eq!(scheduler.dispatch(Time(MS)), Some((class, cost, 7)));
    scheduler.finished(cost);
    assert!(scheduler.admit(Time(MS), class, cost));
}

#[test]
fn a_class_that_was_idle_does_not_make_up_for_it() {
    let mut scheduler = Scheduler::new(Cost(1));
    let idle = scheduler.add_class(Shares::default());
    let busy = scheduler.add_class(Shares::default());
    let cost = Cost::of_bytes(4096);
    (0..100).for_each(|_| scheduler.enqueue(busy, cost, ()));
    for _ in 0..50 {
        let (_, cost, ()) = scheduler.dispatch(Time(MS)).unwrap();
        scheduler.finished(cost);
    }
    (0..100).for_each(|_| scheduler.enqueue(idle, cost, ()));
    let mut served = [0; 2];
    for _ in 0..40 {
        let (class, cost, ()) = scheduler.dispatch(Time(MS)).unwrap();
        served[class.0 as usize] += 1;
        scheduler.finished(cost);
    }
    assert!(served[busy.0 as usize] >= 19, "{served:?}");
}

#[test]
fn the_dump_shows_what_waits() {
    let mut scheduler = Scheduler::new(Cost(1));
    let class = scheduler.add_class(Shares {
        limit: 1e6,
        ..Shares::default()
    });
    scheduler.enqueue(class, Cost(100), ());
    scheduler.enqueue(class, Cost(50), ());
    let dump = scheduler.dump(Time(MS));
    assert_eq!((dump[0].depth, dump[0].queued), (2, Cost(150)));
    scheduler.remove_class(class);
    assert!(scheduler.dump(Time(MS)).is_empty());
    assert!(
        scheduler.dispatch(Time(MS)).is_some(),
        "what waits is served after the removal"
    );
}
