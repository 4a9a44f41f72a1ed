"""Trains convolutional networks on one image far larger than the device: exact strips, no approximation.

A training step::

    from hydra_ext import tiled

    photograph = tiled.image(pixels, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))  # bytes, on the host
    with tiled.strips(budget="1GiB") as run:
        loss = F.binary_cross_entropy_with_logits(unet(photograph), target)
        loss.backward()
    optimizer.step()
    print(run.report())

A *map* is a tensor (N, C, H, W) on the host; a *strip* is some of its rows on the device.

**Design.** Layers one after the other, each in strips, maps whole on the host. The alternative, a chain of layers on
one strip after the other, reads the image once but computes each halo again in every layer, needs the network as a
chain, and has to keep or recompute what backward reads; batch normalisation, whose statistics belong to the whole map,
ends every chain. With whole maps the halo exchange is a read of rows that are there, nothing is computed twice, and
any network will do.

Operations are seen below autograd (a dispatch mode), forward and backward: the formulas, what is kept, hooks, retained
graphs, checkpoints and in-place operations are torch's own, and the model is a plain module with its parameters on the
CPU. ``torch.utils.checkpoint`` around parts of the model keeps fewer maps on the host, with the same numbers.

- Convolutions and transposed convolutions of any kernel, stride, padding, dilation and groups, max and average pooling,
  upsampling ('nearest' by a whole factor, 'bilinear' by a power of two without aligned corners), batch normalisation,
  everything pointwise (flattened maps as well), softmax along channels or columns, losses of two maps: on the device.
- Copies, concatenation, padding, random numbers, sums to a few numbers (the loss), the loss over classes: on the host,
  where the maps are. They read each number about once, for which the link would take longer. Dropout so has the
  numbers that it has without strips on a CPU. So are batch normalisation's statistics, unless the device is a GPU.
- Everything else on a map raises :class:`~hydra_ext.errors.UnsupportedOperation`, which names it. What is smaller than
  a strip, such as an optimizer's step, is left alone.

**Memory.** Everything on the device counts in the budget; on the simulated one the allocator enforces it to the byte,
what oneDNN copies into blocks of 16 channels among it. A strip's height follows from the budget, or is ``rows=``. What
is there depends on the strip and on the image's width, not on its height; strips of fp32 maps have at least 20,480
elements. The host holds what plain PyTorch would hold on its device, but bytes instead of the image's numbers.

**Numbers.** Compared with the same module on the CPU without strips, in the same number of threads:

- Maps, and gradients that a convolution passes on, are made by one call for each element, of the same operation from
  the same numbers, and have the same bits where torch takes the same kernel for the strip as for the map. It takes
  another one for fp32 maps of at most 20,480 elements, hence the bound above, and for kernels of 1 where the stride
  divides the height, so that a strip has as many rows left over as the map. Square kernels of 1, 3, 5 and 7 without
  groups have had the same bits in everything that was run, with strides of 1 and 2; grouped convolutions of 5 and 7 and
  unusual even kernels may differ in the last bits. Of exp, log and their kin the last bit of a few elements at a
  strip's end may differ where strips are no multiple of 64 elements; strips are made so wherever that is possible. In
  fp64, convolutions differ by the order of sums.
- Maps lie in memory as plain PyTorch's: with channels last where the input or a convolution's weight does.
- The loss is summed by torch's own reduction over the whole map: equal maps give an equal loss to the last bit.
- Gradients of weights and biases are sums over strips, added in fp64 and rounded once: another order than plain
  PyTorch's, and nearer to the exact sum, but not its bits. They are the same in every run with the same strips.
- Batch normalisation has the bits of the whole map on the simulated device. Its backward adds up over strips, in fp64,
  what torch adds up in fp32: gradients that pass through it differ in their last bits. On a GPU statistics are merged
  over strips in fp64, and maps differ by a few units in the last place as well.

``tests/tiled`` holds losses to that, and gradients to be no farther from an fp64 run than twice plain fp32's.

**Limits.** Forward, loss and backward are called inside the context, on one thread: a backward after it is a plain one,
on the CPU. The width is not cut. What is computed in a strip is sent for each operation: the link carries every map
several times. A parameter inside ``hydra_ext.offload`` cannot be used here, nor one strips context inside another. An
operation in place may read nothing of what it writes but the element itself. On a GPU, rows pass through pinned
buffers, copies out overlap with the next strip's work, copies in do not; that code has not run on a GPU yet.
"""

from __future__ import annotations

from hydra_ext.tiled.pixels import image
from hydra_ext.tiled.run import TiledReport, TiledRun
from hydra_ext.tiled.strips import strips

__all__ = ["TiledReport", "TiledRun", "image", "strips"]
