//! The run's checkpoints: the parts that come in, and copies of whole ones in other sites.

use std::collections::BTreeSet;

use starling_model::checkpoint::PartHead;
use starling_swarm::coordinator::Input;
use starling_swarm::worker::io::StateOf;
use starling_transport::identity::PublicKey;
use starling_transport::ticket::Role;

use crate::coordinator::{Coordinator, CoordinatorError};
use crate::disk::Kept;
use crate::post::Post;

impl Coordinator {
    /// Whether a part is one that may be wanted.
    pub(super) fn is_believable(&self, of: StateOf, head: &PartHead) -> bool {
        let book = self.machine.journal();
        of.stage.0 < self.charter.spec.stages
            && of.epoch == book.epoch
            && of.version <= book.step
            && of.version > book.checkpoint
            && head.class.len() <= 256
    }

    /// The disk has done something.
    pub(super) fn on_kept(&mut self, kept: Kept) -> Result<(), CoordinatorError> {
        match kept {
            Kept::Journaled(number) => self.tell(Input::Journaled(number))?,
            Kept::Part(from, of) => {
                self.kept.insert((of.epoch, of.version, of.stage));
                self.write(from, Post::Kept(of), Vec::new());
            }
            Kept::Answer(to, post, body) => self.write(to, *post, vec![body.into()]),
        }
        Ok(())
    }

    /// Whether this is a driver in another site, which keeps copies if it has a folder for them.
    pub(super) fn keeps_copies(&self, key: PublicKey) -> bool {
        self.registry.get(key).is_some_and(|guest| guest.role == Role::Driver && guest.site != self.site)
    }

    /// There is a new checkpoint: tells all who may copy it.
    pub(super) fn announce_checkpoint(&self) {
        for driver in self.machine.overview().drivers {
            if let Some((key, _)) = self.registry.by_number(driver.0)
                && self.keeps_copies(key)
            {
                self.disk.announce(key);
            }
        }
    }

    /// A driver has a copy.
    pub(super) fn on_copied(&mut self, from: PublicKey, step: u64) -> Result<(), CoordinatorError> {
        let newest = self.machine.journal().checkpoint.0;
        if step < newest {
            self.disk.announce(from); // It was busy when the newest was told of.
        }
        let Some(guest) = self.registry.get(from).filter(|_| step == newest) else { return Ok(()) };
        self.copies.retain(|of, _| *of == step);
        let sites: &mut BTreeSet<String> = self.copies.entry(step).or_default();
        if sites.insert(guest.site) {
            let sites: Vec<&str> = sites.iter().map(String::as_str).collect();
            let text = format!("the checkpoint of step {step} is here and in {}", sites.join(", "));
            self.say(text)?;
        }
        Ok(())
    }
}
