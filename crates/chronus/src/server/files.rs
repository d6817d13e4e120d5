//! File operations as the loop sees them.

use chronus_proto::frame::{self, Kind};
use chronus_proto::request::FileRequest;
use chronus_proto::Code;

use super::{token, Server, Violation};
use crate::conn::Target;
use crate::files;
use crate::ops::{self, Op, Relay};
use crate::spawn::refuse;

impl Server {
    pub(super) fn start_op(&mut self, to: (u32, u32), request: &FileRequest<'_>) {
        if self.may_work_itself() {
            if let Some((data, payload)) = files::quick(request) {
                if let (Some(conn), false) = (self.conns.get_mut(&to.0), data.is_empty()) {
                    frame::put(conn.queue(), Kind::Data, to.1, &data);
                }
                return self.respond(to, &payload);
            }
        }
        if self.ops.len() >= ops::MAX_OPS {
            let text = format!("{} file operations are already under way", ops::MAX_OPS);
            return self.respond_error(to, &refuse(Code::Unavailable, text));
        }
        match Op::start(&self.config, to, request) {
            Ok(op) => {
                let key = self.key();
                self.pids.insert(op.pid, Target::Op(key));
                self.ops.insert(key, op);
                if let Some(conn) = self.conns.get_mut(&to.0) {
                    conn.channels.insert(to.1, Target::Op(key));
                }
                self.settle_op(key);
            }
            Err(refusal) => self.respond_error(to, &refusal),
        }
    }

    /// What this process may do to files must not be more than root of the sandbox may.
    pub(super) fn may_work_itself(&self) -> bool {
        const DAC_OVERRIDE: u64 = 1 << 1;
        self.config.child_caps.is_none_or(|mask| mask & DAC_OVERRIDE != 0)
    }

    pub(super) fn on_op_frame(&mut self, key: u32, kind: Kind, payload: &[u8]) -> Result<(), Violation> {
        let Some(op) = self.ops.get_mut(&key) else {
            return Ok(());
        };
        match kind {
            Kind::Data if !op.push(payload) => return Err(Violation),
            Kind::End => op.finish(),
            Kind::Credit => op.add_credit(frame::parse_credit(payload).ok_or(Violation)?),
            Kind::Cancel => {
                self.cancel(key);
                return Ok(());
            }
            _ => {}
        }
        self.settle_op(key);
        Ok(())
    }

    pub(super) fn on_op_output(&mut self, key: u32) {
        if let Some(op) = self.ops.get_mut(&key) {
            op.read(&self.poll, &mut self.scratch);
        }
        self.settle_op(key);
    }

    /// Move what can be moved in both directions.
    pub(super) fn settle_op(&mut self, key: u32) {
        let Some(op) = self.ops.get_mut(&key) else {
            return;
        };
        let Some(conn) = self.conns.get_mut(&op.owner.0) else {
            return;
        };
        let owed = op.flush();
        if owed > 0 {
            frame::put(conn.queue(), Kind::Credit, op.owner.1, &(owed as u32).to_le_bytes());
        }
        match op.relay(conn) {
            Relay::Done => return self.drop_op(key),
            Relay::Blocked => conn.block(Target::Op(key)),
            Relay::Waiting => {}
        }
        op.watch(&self.poll, token::of(token::OP_OUT, key), token::of(token::OP_IN, key));
    }

    pub(super) fn cancel(&mut self, key: u32) {
        if let Some(op) = self.ops.get(&key) {
            op.cancel(self.pids.contains_key(&op.pid));
        }
        self.drop_op(key);
    }

    pub(super) fn drop_op(&mut self, key: u32) {
        let Some(mut op) = self.ops.remove(&key) else {
            return;
        };
        op.close(&self.poll);
        if let Some(conn) = self.conns.get_mut(&op.owner.0) {
            conn.channels.remove(&op.owner.1);
        }
    }
}
