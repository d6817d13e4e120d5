//! What happens because time passes: checks, timeouts, killing.

use super::execs::marks;
use super::{token, Server, MS};
use crate::exec::{State, Stop};
use crate::sys;
use crate::tree;

impl Server {
    pub(super) fn run_timers(&mut self) {
        let now = sys::now_ns();
        if now < self.next_timer {
            return;
        }
        self.next_timer = u64::MAX;
        let keys: Vec<u32> = self.execs.keys().copied().collect();
        for key in keys {
            self.run_timers_of(key, now);
        }
    }

    pub(super) fn run_timers_of(&mut self, key: u32, now: u64) {
        let due = |at: u64| at != 0 && at <= now;
        let Some(exec) = self.execs.get_mut(&key) else {
            return;
        };
        if due(exec.check_at) {
            exec.check_at = 0;
            if let State::Starting(status) = &exec.state {
                let _ = self.poll.add(status, libc::EPOLLIN, token::of(token::STATUS, key));
            }
            self.settle(key);
        }
        let Some(exec) = self.execs.get_mut(&key) else {
            return;
        };
        if due(exec.timeout_at) {
            exec.timeout_at = 0;
            exec.timed_out = true;
            let grace = exec.grace_ns;
            self.stop(key, grace);
        }
        let Some(exec) = self.execs.get_mut(&key) else {
            return;
        };
        match exec.stop {
            Stop::Grace(at) if at <= now => exec.stop = Stop::Killing(now, MS),
            _ => {}
        }
        if let Stop::Killing(at, pause) = exec.stop {
            if at <= now {
                exec.stop = match tree::kill_round(&self.config, &marks(exec), 20) {
                    0 => Stop::No,
                    _ => Stop::Killing(now + pause, (pause * 2).min(200 * MS)),
                };
            }
        }
        let mut next = [exec.check_at, exec.timeout_at, 0];
        if let Stop::Grace(at) | Stop::Killing(at, _) = exec.stop {
            next[2] = at;
        }
        let over = exec.is_over();
        for at in next.into_iter().filter(|at| *at != 0) {
            self.timer(at);
        }
        if over {
            self.forget(key);
        }
    }
}
