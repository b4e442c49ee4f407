"""An optimizer of your own: `ranvier train gpt-tiny --optim.algorithm examples.own_optimizer:Adagrad
--optim.options epsilon=1e-8 --run-dir runs/own-optimizer`.

An update rule defines the states of each element, and updates parameters in place. The run handles sharding, offload,
checkpoints and resharding. `ranvier.testing.rules.check_rule` checks that a rule implements the protocol;
docs/optimizers.md describes rules that need whole tensors.
"""


class Adagrad:
    """Duchi et al., 2011: steps shrink with the sum of squared gradients of each element."""

    states = ("sum",)  # for each element, zero at first

    def __init__(self, epsilon=1e-10):
        self.epsilon = epsilon

    def update(self, parameters, gradients, states, *, step, learning_rate, weight_decay):
        gradients = gradients.add(parameters, alpha=weight_decay)
        states["sum"].addcmul_(gradients, gradients)
        parameters.addcdiv_(gradients, states["sum"].sqrt().add_(self.epsilon), value=-learning_rate)
