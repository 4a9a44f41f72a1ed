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

**Design.** Layers run one after the other, each in strips; maps are whole on the host. The alternative runs a chain of
layers on one strip after the other. It reads the image once, but computes each halo again in every layer. It needs the
network as a chain, and has to keep or recompute the tensors that backward reads. Batch normalisation ends every such
chain, since its statistics belong to the whole map. With whole maps the halo is read from the neighbouring rows,
nothing is computed twice, and any network will do.

A dispatch mode sees operations below autograd, forward and backward. Formulas, saved tensors, hooks, retained graphs,
checkpoints and in-place operations are torch's own. The model is a plain module with its parameters on the CPU.
``torch.utils.checkpoint`` around parts of the model keeps fewer maps on the host, with the same numbers.

- The device computes convolutions and transposed convolutions of any kernel, stride, padding, dilation and groups, max
  and average pooling, upsampling ('nearest' by a whole factor, 'bilinear' by a power of two without aligned corners),
  batch normalisation, all pointwise operations (of flattened maps as well), softmax along channels or columns, and
  losses of two maps.
- The host, which has the maps, computes copies, concatenation, padding, random numbers, sums to a few numbers (the
  loss), and the loss over classes. These read each number about once; the link would take longer. So dropout has the
  numbers that it has without strips on a CPU. Batch normalisation's statistics are computed on the host, too, unless
  the device is a GPU.
- Every other operation on a map raises :class:`~hydra_ext.errors.UnsupportedOperation`, which names it. Operations on
  tensors smaller than a strip, such as an optimizer's step, run as always.

**Memory.** Everything on the device counts in the budget. On the simulated device the allocator enforces it to the
byte, including oneDNN's copies in blocks of 16 channels. A strip's height follows from the budget, or is ``rows=``.
The device's memory depends on the strip and on the image's width, not on its height. Strips of fp32 maps have at least
20,480 elements. The host holds the tensors that plain PyTorch would hold on its device, but the image as bytes.

**Numbers.** They are compared with those of the same module on the CPU without strips, in the same number of threads.

- One call makes each element of a map, or of a gradient that a convolution passes on, by the same operation from the
  same numbers. It has the same bits if torch takes the same kernel for the strip as for the map.

  - For fp32 maps of at most 20,480 elements torch takes another kernel, hence the bound above. It also does for kernels
    of 1 if the stride divides the height, so a strip has as many rows left over as the map.
  - Square kernels of 1, 3, 5 and 7 without groups have had the same bits in all runs, with strides of 1 and 2. Grouped
    convolutions of 5 and 7 and unusual even kernels may differ in the last bits.
  - The last bit of exp, log and similar functions may differ for a few elements at a strip's end, unless the strip has
    a multiple of 64 elements. Strips are made so if possible.
  - In fp64, convolutions differ by the order of sums.

- Maps have plain PyTorch's memory format: channels last if the input or a convolution's weight has it.
- torch's own reduction over the whole map sums the loss: equal maps give an equal loss to the last bit.
- Gradients of weights and biases are sums over strips, added in fp64 and rounded once. The order is not that of plain
  PyTorch: they are nearer to the exact sum, but do not have its bits. Every run with the same strips gives the same.
- Batch normalisation has the bits of the whole map on the simulated device. Its backward adds over strips in fp64,
  where torch adds in fp32: gradients that pass through it differ in their last bits. On a GPU statistics are merged
  over strips in fp64, and maps differ by a few units in the last place as well.

``tests/tiled`` checks losses for equal bits, and gradients for an error against an fp64 run of at most twice that of
plain fp32.

**Limits.** Forward, loss and backward belong inside the context, on one thread; a backward after it is a plain one, on
the CPU. The width is not cut. Each operation transfers its maps: the link carries every map several times. A parameter
inside ``hydra_ext.offload`` cannot be used here, nor one strips context inside another. An operation in place may read
only the element that it writes. On a GPU, rows pass through pinned buffers. Copies out overlap with the next strip's
work, copies in do not. That code has not run on a GPU yet.
"""

from __future__ import annotations

from hydra_ext.tiled.pixels import image
from hydra_ext.tiled.run import TiledReport, TiledRun
from hydra_ext.tiled.strips import strips

__all__ = ["TiledReport", "TiledRun", "image", "strips"]
