r"""Optimizers as the training loop sees them: schedules, AdamW, Muon, and a step that can be skipped.

Of the model this file knows where its blocks are and what kinds of modules they hold; of data and run directories
nothing.

The schedules, with warmup_steps W and max_steps S. Cosine (Loshchilov and Hutter 2017) has to know S from the start;
wsd (warmup, stable, decay; Hu et al. 2024, section 4) can continue from any checkpoint of its plateau to a later end;
four_phases is wsd for AdamW, while Muon's rate falls soon after the warmup (`muon_height`):

    max_lr     .-._                     max_lr     .-----------.
              /    `-.                            /             \
    min_lr   /        `--.              min_lr   /               \
            0  W         S                      0  W             S
"""

import math
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parts.cli import UserError
from parts.runtime import Runtime


def learning_rate(step: int, config) -> float:
    """Return the learning rate of step 1 .. max_steps.

    Reads max_steps, warmup_steps, max_lr, min_lr, lr_schedule and decay_fraction of `config`.
    """
    warmup_steps = min(config.warmup_steps, config.max_steps)
    progress = (step - warmup_steps) / max(1, config.max_steps - warmup_steps)  # 0 .. 1 after the warmup
    if config.lr_schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.lr_schedule in ("wsd", "four_phases"):
        height = min(1.0, (1 - progress) / config.decay_fraction)
    else:
        raise UserError(f"lr_schedule {config.lr_schedule}: add it to learning_rate in parts/optim.py")
    if step <= warmup_steps:  # AdamW's moments still average only a few gradients: mostly noise
        return config.max_lr * step / warmup_steps
    return config.min_lr + height * (config.max_lr - config.min_lr)


def plateau_end(config) -> float:
    """Return the last step of the plateau of `wsd`, from which another decay can begin; 0 for schedules without one."""
    if config.lr_schedule != "wsd":
        return 0
    return config.max_steps - config.decay_fraction * (config.max_steps - min(config.warmup_steps, config.max_steps))


def muon_height(step: int, config) -> float:
    """Return Muon's learning rate as a fraction of muon_lr, in step 1 .. max_steps: the shape of AdamW's, except in
    `four_phases`.

    Its phases are the warmup, a plateau until 4% of the steps after it, a fast decay to a fifth until 56%, and a slow
    one to 0. The constants are those of modded-nanogpt, track 3, PR 351.
    """
    warmup_steps = min(config.warmup_steps, config.max_steps)
    if config.lr_schedule != "four_phases" or step <= warmup_steps:
        return learning_rate(step, config) / config.max_lr
    progress = (step - warmup_steps) / (config.max_steps - warmup_steps)
    fast = 1 - 0.8 * (max(0.0, progress - 0.04) / 0.52) ** 0.6
    slow = 0.2 * (1 - progress) / 0.44
    return max(fast, slow)  # they meet at 56%


# ------------------------------------------------------------------------------------------------- what gets which


def make_optimizer(model, config, rt: Runtime) -> "Optimizer":
    """Make the optimizer of a training run over the trainable parameters of `model`.

    Reads optimizer (adamw if it has none), max_lr, muon_lr, weight_decay, beta1, beta2 and eps of `config`. To add an
    optimizer, add it here: any of torch.optim will do, and any with its interface. Raises UserError for another name.
    """
    name = getattr(config, "optimizer", "adamw")
    params = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw":
        optimizers = [adamw(decay_groups(params, config.weight_decay), config)]
    elif name == "muon":
        groups = muon_groups(model)
        matrices = {id(p) for group in groups for p in group["params"]}
        rest = [p for p in params if id(p) not in matrices]
        settings = dict(dtype=rt.dtype, compile=rt.compile, rank=rt.rank, world_size=rt.world_size)
        muon = Muon(groups, config.muon_lr, config.weight_decay, **settings)
        optimizers = [adamw(decay_groups(rest, config.weight_decay), config), muon]
    else:
        raise UserError(f"optimizer {name}: add it to make_optimizer in parts/optim.py")
    return Optimizer(optimizers, rt)


def muon_groups(model) -> list[dict]:
    """Group the trainable weights of the blocks' linear layers, which map one hidden space into another.

    All else is AdamW's: in an embedding each row is on its own, also in one inside a block, and the head is a
    classifier (Jordan 2024). c_attn stacks the matrices of Q, K and V; orthogonalized as one matrix, the largest
    gradient of the three would get most of it. So each is its own: Q has as many rows as columns, K and V share the
    rest.
    """
    groups = {(): []}  # by the rows of each matrix in a weight; () is a single one
    for name, module in model.transformer.h.named_modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad:
            rows = ()
            if name.endswith("c_attn"):
                shared = module.out_features - module.in_features
                rows = (module.in_features, shared // 2, shared // 2)
            groups.setdefault(rows, []).append(module.weight)
    return [dict(params=params, stacked=rows) for rows, params in groups.items()]


def decay_groups(params, weight_decay: float) -> list[dict]:
    """Return [group with weight decay, group without], for torch.optim.

    Tensors of two dimensions, which multiply activations or are looked up, are decayed: without decay weights grow for
    as long as training lasts, and a step of the same length turns them less and less. Biases and LayerNorm gains are
    not: they are few (in GPT-2 124M 98 tensors with 121,344 numbers, against 50 with 124,354,560), too few to overfit,
    and a gain that decays towards 0 shrinks the input of the next layer.
    """
    params = list(params)
    decayed = dict(params=[p for p in params if p.dim() >= 2], weight_decay=weight_decay)
    others = dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0)
    return [decayed, others]


def adamw(groups: list[dict], config) -> torch.optim.AdamW:
    """Make AdamW (Loshchilov and Hutter 2019) with max_lr, beta1, beta2 and eps of `config`.

    Each number steps by the mean of its recent gradients over the root of their mean square, so it moves by about the
    learning rate, however large its gradient is. beta2 0.95, as in GPT-3, remembers about 20 gradients; torch's
    default of 0.999 remembers 1000, and is slow to notice that gradients have grown. `fused` updates all tensors in one
    kernel instead of a dozen operations each.
    """
    return torch.optim.AdamW(groups, lr=config.max_lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


# ------------------------------------------------------------------------------------------- what the loop sees


class Optimizer:
    """One or two torch optimizers, and the loss scale of fp16, as the loop sees them.

    `Muon` and torch's fused optimizers skip a bad step on their own, on the device. Any other torch optimizer works
    too, at the price of a host that waits for the device in every step. A group's `peak` is the learning rate that it
    was made with.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer], rt: Runtime):
        self.optimizers = optimizers
        self.rt = rt
        self.loss_scale = LossScale(rt.device) if rt.dtype == torch.float16 else None
        for group in self.param_groups():
            group["peak"] = group["lr"]
        self.made_with = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups()]

    def param_groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def set_lr(self, height: float, muon_height: float | None = None) -> None:
        """Set each group's learning rate to a fraction of its peak, 0 to 1: `height`, or `muon_height` for Muon."""
        for optimizer in self.optimizers:
            own = muon_height if isinstance(optimizer, Muon) and muon_height is not None else height
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * own

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call `.backward()` on: in fp16 multiplied by the loss scale, else as it is."""
        return self.loss_scale.scale * loss if self.loss_scale else loss

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Shrink the gradients of all parameters together to the norm `max_norm` where they exceed it (Pascanu et al.
        2013); 0 only measures. Returns the norm before, a scalar on the device."""
        params = [p for group in self.param_groups() for p in group["params"]]
        grads = [p.grad for p in params if p.grad is not None]
        if self.loss_scale:
            torch._foreach_mul_(grads, 1 / self.loss_scale.scale)
        norm = torch.nn.utils.get_total_norm(grads)
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm

    def step(self, finite: Tensor) -> None:
        """Update the parameters; where `finite`, a bool scalar, is False, nothing changes.

        `finite` stays on the device if the optimizer reads it there: a host that waited for its value could not launch
        the next step's work meanwhile. It has to be equal on all ranks.
        """
        for optimizer in self.optimizers:
            # Apple's fused kernel appears to ignore found_inf
            if optimizer.defaults.get("fused") and self.rt.device.type != "mps":
                optimizer.found_inf = (~finite).float()  # the name under which torch's fused kernels know it
                optimizer.step()
            elif finite:
                optimizer.step()
        if self.loss_scale:
            self.loss_scale.update(finite)

    def zero_grad(self) -> None:
        """Clear the gradients: the next backward pass adds to them. On several ranks they stay views of the buckets
        that ranks exchange; a new tensor, made by the next backward pass, would be a second copy of each."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.rt.world_size == 1)

    def state_dict(self) -> dict:
        """Return the state to checkpoint."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        scaler = self.loss_scale.state_dict() if self.loss_scale else {}
        return dict(optimizers=states, made_with=self.made_with, scaler=scaler)

    def load_state_dict(self, state: dict) -> None:
        """Restore the optimizers' state and the loss scale. An entry of a group that was made with another value now,
        such as a rate, stays as it is; all others, such as an optimizer's counters, are state. Raises ValueError for
        the state of other parameters."""
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            check_sizes(optimizer, saved)
            optimizer.load_state_dict(saved)
        for group, now, then in zip(self.param_groups(), self.made_with, state["made_with"], strict=True):
            group.update({key: value for key, value in now.items() if value != then.get(key)})
        if self.loss_scale and state["scaler"]:  # {}: the run was not in fp16 then
            self.loss_scale.load_state_dict(state["scaler"])


def check_sizes(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Raise ValueError for moments of other sizes: a fused kernel would write past the end of a smaller tensor."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, moments in saved["state"].items() if optimizer.defaults.get("fused") else ():
        for name, moment in moments.items():
            if moment.shape not in (torch.Size(), params[i].shape):
                raise ValueError(f"{name} of parameter {i} is {tuple(moment.shape)}, not {tuple(params[i].shape)}")


class LossScale:
    """Keeps the gradients of fp16 within its range (Micikevicius et al. 2018, section 3.2).

    fp16 holds nothing between 0 and 6e-8, where many gradients lie. So the loss is multiplied by a large number, which
    the chain rule hands on to all gradients, and they are divided by it, in fp32, before anything else happens. Too
    large a number overflows: it halves after such a step, and doubles after GROW_AFTER good ones in a row. Like
    torch.amp.GradScaler, but the decision about a step is the caller's, so that the host never waits for the GPU.
    """

    GROW_AFTER = 2000

    def __init__(self, device):
        self.scale = torch.full((), 2.0**16, device=device)
        self.good_steps = torch.zeros((), device=device)  # in a row

    def update(self, finite: Tensor) -> None:
        self.good_steps = torch.where(finite, self.good_steps + 1, 0.0)
        grow = self.good_steps == self.GROW_AFTER
        grown = torch.where(grow, self.scale * 2, self.scale)
        self.scale = torch.where(finite, grown, self.scale / 2)
        self.good_steps = torch.where(grow, 0.0, self.good_steps)

    def state_dict(self) -> dict:
        return dict(scale=self.scale.item(), good_steps=int(self.good_steps.item()))

    def load_state_dict(self, state: dict) -> None:
        self.scale.fill_(state["scale"])
        self.good_steps.fill_(state["good_steps"])


# ------------------------------------------------------------------------------------------------------------ Muon


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024): momentum, orthogonalized, for the weight matrices of hidden layers.

    Write a matrix of momentum as G = U S V^T, its singular value decomposition. In a transformer a few directions have
    singular values orders of magnitude above the others, and a step along G learns those alone. Muon steps along
    U V^T: the same directions, all of them equally far. To first order it is the step that lowers the loss most among
    all that move no output by more than a fixed length, for inputs of length 1 (Bernstein and Newhouse 2024, "Old
    optimizer, new norm").

    A matrix with more rows than columns gets sqrt(rows / columns) times the learning rate. The matrices of a
    group with `stacked` are cut into matrices of so many rows each. `found_inf`, a scalar tensor, is 1 for a step that
    must change nothing, as in torch's fused AdamW; hence `fused` in the defaults.

    torch.optim.Muon computes the same, one matrix after the other and always in bf16. Here matrices of one shape go
    through together, because a GPU that multiplies one matrix of 768 x 768 at a time is mostly idle; several ranks
    share them out. And products are in `dtype`: in an fp32 run, rounding to bf16 would turn the last bit of a gradient,
    which depends on how the batch is spread over ranks, into a difference in the fourth digit of the loss after 20
    steps.
    """

    def __init__(
        self,
        params,
        lr,
        weight_decay,
        momentum=0.95,
        stacked=(),
        dtype=torch.bfloat16,
        compile=False,
        rank=0,
        world_size=1,
    ):
        constants = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, dtype=dtype, stacked=stacked, fused=True)
        super().__init__(params, constants)
        self.rank = rank
        self.world_size = world_size
        self._nesterov = torch.compile(nesterov, dynamic=True) if compile else nesterov

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            same_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    same_shape[p.shape].append(p)
            for params in same_shape.values():
                self._step_together(params, group)

    def _step_together(self, params: list, group: dict) -> None:
        """Take one step of N matrices of one shape."""
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in params]
        good = 1.0 - getattr(self, "found_inf", params[0].new_zeros(()))  # 1 or 0

        # as vectors (N r columns,): one compiled graph then serves all shapes, and one of squares would not
        grad = torch.cat([p.grad.flatten() for p in params])
        momentum = torch.cat([tensor.flatten() for tensor in momenta])
        update = self._nesterov(grad, momentum, group["momentum"], good)
        shape = (len(params), *params[0].shape)  # (N, r, columns)
        torch._foreach_copy_(momenta, list(momentum.view(shape)))

        rows = group["stacked"] or shape[1:2]
        if len(set(rows)) == 1:  # all at once
            step = self._direction(update.view(-1, rows[0], shape[2]), group["dtype"]).view(shape)
        else:
            parts = update.view(shape).split(rows, dim=1)
            step = torch.cat([self._direction(part, group["dtype"]) for part in parts], dim=1)

        lr = group["lr"] * good
        step *= lr
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_sub_(params, list(step))

    def _direction(self, matrices: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the steps (M, rows, columns) of M matrices of momentum."""
        rows, columns = matrices.shape[1:]
        step = orthogonalized(matrices, dtype) if self.world_size == 1 else self._shared_out(matrices, dtype)
        return step.to(matrices.dtype) * math.sqrt(max(1, rows / columns))

    def _shared_out(self, matrices: Tensor, dtype: torch.dtype) -> Tensor:
        """Orthogonalize an equal share of M matrices on each rank, and exchange the results."""
        M = len(matrices)
        share = math.ceil(M / self.world_size)
        mine = matrices[self.rank * share :][:share]
        mine = F.pad(mine, (0, 0, 0, 0, 0, share - len(mine)))  # with matrices of zeros
        mine = orthogonalized(mine, dtype)
        steps = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(steps, mine)
        return torch.cat(steps)[:M]


def nesterov(grads, momenta, beta: float, good):
    """Update the momenta in place, and return where one more gradient like this one would take them; `good` is 1 or 0.

    In a bad step the momenta replace the gradients: lerp between equal numbers changes nothing.
    """
    grads = torch.where(good > 0, grads, momenta)
    momenta.lerp_(grads, 1 - beta)
    return grads.lerp_(momenta, beta)


def orthogonalized(matrices: Tensor, dtype: torch.dtype = torch.bfloat16, steps: int = 5) -> Tensor:
    """Return U V^T, nearly, for each U S V^T of `matrices` (N, rows, columns); products and result are in `dtype`.

    The singular value decomposition itself is slow on a GPU. But an odd polynomial of a matrix,

        p(X) = a X + b (X X^T) X + c (X X^T)^2 X = U (a S + b S^3 + c S^5) V^T,

    changes its singular values and nothing else, since X X^T = U S^2 U^T, and takes three products. So find one that,
    applied again and again, moves every number of (0, 1] close to 1. The classical coefficients of Newton and Schulz,
    (15/8, -10/8, 3/8), reach 1 exactly, but the slope at 0 is 15/8, and a singular value of 0.001 has come to 0.023
    after five times. Jordan's coefficients give up the limit for a slope of 3.44: after five times everything from
    0.002 to 1 lies between 0.68 and 1.21, and that trains as well as 1 does (Jordan 2024).

    This is also why bf16, with its relative error of 2^-9, is enough: a product is wrong by 0.2% where the result is
    wanted to 30%, and each application corrects the errors of the one before in the singular values. Tensor cores
    multiply bf16 twice as fast as TF32. For a matrix of n x n all this takes 30 n^3 operations a step, against the 6
    n^2 a token of training it: 0.7% for n = 768 and half a million tokens.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    upright = matrices.size(1) > matrices.size(2)
    x = matrices.mT if upright else matrices  # the Gram matrix is then the smaller one
    with torch.autocast(matrices.device.type, enabled=False):
        # no singular value exceeds the Frobenius norm, so that all lie in (0, 1] from here on
        norms = x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
        x = (x / norms).to(dtype)
        for _ in range(steps):
            gram = x @ x.mT  # (N, n, n)
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b X X^T + c (X X^T)^2
            x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT.contiguous() if upright else x  # as the fused update wants it
