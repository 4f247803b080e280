//! The tensors that a node holds, by handle: shared by the loop, which receives and sends them, and the thread that
//! computes.
//!
//! What came with a message, and what was computed for one, is kept until the machine forgets the job it belongs to, or
//! its step is closed: so nothing outlives two steps, whatever is refused or lost on the way.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use starling_swarm::ids::{Payload, Step};
use starling_swarm::message::Envelope;

use crate::tensor::Tensor;

/// Tensors at a time, at the most: the machine's own bounds keep an honest run far below.
const MOST_TENSORS: usize = 1 << 16;

/// See the module's head. Clones share what they hold.
#[derive(Clone, Debug, Default)]
pub struct Tensors(Arc<Mutex<Held>>);

#[derive(Debug, Default)]
struct Held {
    /// With the step after whose end a handle stands for nothing.
    by_handle: BTreeMap<u64, (Step, Arc<Tensor>)>,
    last_handle: u64,
}

impl Tensors {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.held().by_handle.len()
    }

    /// A message came with a tensor: from here on the message names it by our handle.
    pub fn receive(&self, envelope: &mut Envelope, tensor: Option<Arc<Tensor>>) {
        let step = envelope.fence.step;
        if let (Some(payload), Some(tensor)) = (envelope.payload_mut(), tensor) {
            *payload = self.store(step, tensor);
        }
    }

    /// Keeps a tensor.
    pub fn store(&self, step: Step, tensor: Arc<Tensor>) -> Payload {
        let mut held = self.held();
        held.last_handle += 1;
        let (handle, bytes) = (held.last_handle, tensor.bytes());
        held.by_handle.insert(handle, (step, tensor));
        if held.by_handle.len() > MOST_TENSORS {
            // Somebody sends what is not wanted: what lies farthest ahead goes first.
            let farthest =
                held.by_handle.iter().max_by_key(|(_, (step, _))| *step).map(|(&handle, _)| handle);
            farthest.and_then(|handle| held.by_handle.remove(&handle));
        }
        Payload { handle, bytes }
    }

    /// What a payload stands for.
    pub fn get(&self, payload: Payload) -> Option<Arc<Tensor>> {
        self.held().by_handle.get(&payload.handle).map(|(_, tensor)| tensor.clone())
    }

    /// What a payload stands for, of which there is no further use.
    pub fn take(&self, payload: Payload) -> Option<Arc<Tensor>> {
        self.remove(payload.handle)
    }

    /// Drops a tensor.
    pub fn remove(&self, handle: u64) -> Option<Arc<Tensor>> {
        self.held().by_handle.remove(&handle).map(|(_, tensor)| tensor)
    }

    /// Drops what belongs to the steps before this one.
    pub fn drop_before(&self, step: Step) {
        self.held().by_handle.retain(|_, (of, _)| *of >= step);
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        // Nobody panics while holding it; if somebody did, what is held is still whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
