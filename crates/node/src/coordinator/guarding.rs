//! Losses that are spikes: the run goes back, and some updates are left out.

use starling_model::reference::StepReport;
use starling_swarm::coordinator::{Input, Order};
use starling_swarm::ids::Step;

use crate::coordinator::{Coordinator, CoordinatorError};
use crate::events::Event;

impl Coordinator {
    /// The first of the steps whose updates are to be left out, if the loss of a step is a spike.
    pub(super) fn spike(&mut self, report: &StepReport) -> Result<Option<Step>, CoordinatorError> {
        let (step, loss, to) = (report.step, report.loss.mean(), self.machine.journal().checkpoint.0);
        if !self.guard.is_spike(step, loss) {
            return Ok(None);
        }
        if let Err(times) = self.guard.goes_back(to) {
            self.say(format!(
                "paused: the loss of step {step} is {loss:.4}, a spike, and the run went back to the checkpoint of step \
                 {to} {times} times. Amend the learning rate, and go on with `starling run resume`"
            ))?;
            self.tell(Input::Operator(Order::Pause))?;
            return Ok(None);
        }
        let first = self.guard.leave_out(step, self.charter.run.checkpoint.every);
        self.log.append_at(self.clock, Event::LeftOut { first, last: step, loss })?;
        Ok(Some(Step(first)))
    }
}
