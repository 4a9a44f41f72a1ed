"""Directed links between two ranks: whole messages, in order, behind the computation.

A link has a process group of its own: no message of another link can come between its messages, and each side waits for
the other side only. Its sender and its receiver are a thread each; they wait inside torch.distributed. The thread that
computes only puts messages and takes them. Putting a message begins to send tensors of the host.

A receiver listens for the next prologue while no message is under way, and so notices when the other process ends. It
fetches the tensors behind a prologue only once the message is *expected*, which means that there is room for them.
Until then the sender holds them. If the last two messages had the same layouts, the receives of the next one's tensors
are posted before its prologue comes. The message then needs one trip. Both ends count changes of the layouts and tag
tensors with that number. So a receive that was posted for other layouts meets no message. gloo keeps such receives
until the link ends. If there are many, the receiver posts no more of them ahead, which the sender need not know.

gloo carries tensors of the host. Tensors of a GPU go through the host, unless the ranks' default backend is NCCL, which
carries them from GPU to GPU. The tensors of one message are then one kernel on either side.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque

import torch
from torch import Tensor

from hydra_ext import _C
from hydra_ext.pipeline.ranks import messages
from hydra_ext.pipeline.ranks.channel import Channel, Forms, Layouts, LinkStream, Posted, write_counts
from hydra_ext.pipeline.ranks.groups import Groups
from hydra_ext.pipeline.ranks.messages import END, PROLOGUE_WORDS, Form, Message, NumberedForm, Prologue
from hydra_ext.pipeline.ranks.outgoing import Outgoing, when_computed, written
from hydra_ext.pipeline.ranks.transfers import ROOM, LinkLog, Transfer
from hydra_ext.pipeline.ranks.transport import TransportError, backend_of
from hydra_ext.pipeline.ranks.watch import Failure, Watch, describe_error

logger = logging.getLogger(__name__)

_MOST_ABANDONED = 1000  # abandoned receives of a link, of about 1 KB each


class Outbox:
    """The sending end of a link.

    Attributes:
        sent_bytes: Bytes of tensors that were put so far.
        log: The log of its messages.
    """

    def __init__(self, channel: Channel, peer: int, device: torch.device, watch: Watch, log: LinkLog) -> None:
        self.sent_bytes = 0
        self.log = log
        self._device = device
        self._channel = channel
        self._peer = peer
        self._watch = watch
        self._forms: Forms[tuple[object, ...], NumberedForm] = Forms()
        self._layouts = Layouts()
        self._waiting = 0  # messages that were put and are not sent yet
        self._flushed = False  # a thread waits for sends, or has waited
        self._queue: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"hydra_ext {log.link}", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Sends a message after those before it. Do not write to its tensors until it is sent.

        A write that is noticed ends the pipeline. Tensors of the host are sent on the caller's thread: waking the
        link's thread first would take longer than the transport.

        Raises:
            RankFailed: A rank has failed.
        """
        self._watch.check()
        start = time.perf_counter()
        form, words = self._form_of(message)
        self._layouts.note(form.present)
        present = (tensor for tensor in message.tensors if tensor is not None)
        there = [messages.packed(tensor, layout) for tensor, layout in zip(present, form.present, strict=True)]
        number, computed, counts = self._layouts.number, when_computed(self._device), write_counts(there)
        outgoing = Outgoing(
            message.batch, message.microbatch, form.nbytes, start, words, there, counts, number, computed, []
        )
        if self._device.type == "cpu":
            try:
                self._send(outgoing)
            except TransportError as error:
                _peer_ended(self._watch, self._peer, error)
                self._watch.check()
        self.sent_bytes += form.nbytes
        with self._watch.changed:
            self._waiting += 1
        self._queue.put(outgoing)

    def _form_of(self, message: Message) -> tuple[Form, list[Tensor]]:
        """A message's form, and the words that go before its tensors."""
        key = messages.form_key(message)
        known = self._forms.use(key)
        if known is not None:
            return known.form, [known.prologue(message, 0).encode()]
        known = NumberedForm(self._forms.noted, messages.form_of(message))
        self._forms.note(key, known)
        description = messages.describe(known.form)
        return known.form, [known.prologue(message, description.numel()).encode(), description]

    def _send(self, outgoing: Outgoing) -> None:
        """Begins to send the tensors, and only then announces them.

        So a receive on the other GPU never holds one of its hardware queues before this side's send has begun.
        """
        if outgoing.computed is not None:
            outgoing.computed.synchronize()
        outgoing.sends.extend(self._channel.send(outgoing.tensors, outgoing.layout))
        outgoing.sends.extend(self._channel.send_words(words) for words in outgoing.words)

    def flush(self) -> None:
        """Returns when all messages that were put have been sent.

        Raises:
            RankFailed: A rank has failed.
        """
        with self._watch.changed:
            self._flushed = True
        self._watch.wait_for(lambda: self._waiting == 0)

    def close(self, timeout: float) -> bool:
        """Ends the thread after it has sent all messages.

        Args:
            timeout: Seconds to wait for that.

        Returns:
            Whether the thread has ended.
        """
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        stream = LinkStream(self._device)
        try:
            while (entry := self._queue.get()) is not None:
                with stream, torch.no_grad():
                    if not entry.sends:
                        self._send(entry)
                    for send in entry.sends:
                        self._channel.wait(send)
                if write_counts(entry.tensors) != entry.counts:
                    self._watch.fail(written(self._watch.rank, entry, self.log.link))
                self.log.note(entry.batch, entry.microbatch, entry.nbytes, entry.start)
                del entry, send  # frees the tensors
                with self._watch.changed:
                    self._waiting -= 1
                    if self._flushed:  # it would wake a thread that waits for something else
                        self._watch.changed.notify_all()
            self._channel.wait(self._channel.send_words(END.encode()))
        except TransportError as error:
            _peer_ended(self._watch, self._peer, error)
        except Exception as error:  # noqa: BLE001 - threads that wait for the link have to learn of it
            self._watch.fail(Failure(self._watch.rank, f"sending {self.log.link}", describe_error(error)))


class Inbox:
    """The receiving end of a link.

    Attributes:
        received_bytes: Bytes of tensors that have arrived so far.
        received_ahead: Number of messages whose receives had been posted before their prologues came.
        abandoned: Number of receives that were posted for another layout than that of the message.
        log: The log of its messages.
    """

    def __init__(self, channel: Channel, peer: int, device: torch.device, watch: Watch, log: LinkLog) -> None:
        self.received_bytes = 0
        self.received_ahead = 0
        self.abandoned = 0
        self.log = log
        self._channel = channel
        self._peer = peer
        self._device = device
        self._watch = watch
        self._stream = LinkStream(device)
        self._forms: Forms[int, Form] = Forms()
        self._arrived: list[Message] = []
        self._expected = threading.Semaphore(0)
        self._posting = threading.Lock()  # guards the two below
        self._layouts = Layouts()
        self._posted: deque[Posted | None] = deque()  # an entry for each expected message
        self._ended = False  # this side has closed the link
        self._over = False  # no message will come
        self._thread = threading.Thread(target=self._run, name=f"hydra_ext {log.link}", daemon=True)
        self._thread.start()

    def expect(self) -> None:
        """Lets one more message come: there is room for its tensors.

        Raises:
            RankFailed: A rank has failed.
        """
        with self._posting:
            # The link's thread posts receives for messages behind others: it has time while this one computes.
            is_next = not self._posted
            try:
                self._posted.append(self._post_ahead() if is_next else None)
            except TransportError as error:
                _peer_ended(self._watch, self._peer, error)
                self._watch.check()
        self._expected.release()

    def _post_ahead(self) -> Posted | None:
        """Posts receives for the next message, if it is likely to be like the last two. The caller holds the lock."""
        likely = self._layouts.repeats and self._channel.receives_ahead and self.abandoned < _MOST_ABANDONED
        return self._post() if likely else None

    def _post(self) -> Posted:
        """Posts receives of tensors in the last message's layout. The caller holds the lock."""
        with _C.Uncharged():  # a device under a budget gets copies, which its budget counts
            tensors = [each.packed.empty(self._channel.device) for each in self._layouts.last]
        return Posted(self._layouts.number, tensors, self._channel.post(tensors, self._layouts.number))

    def take(self) -> Message:
        """Waits for the next message, which has to be expected, and returns it.

        Raises:
            RankFailed: A rank has failed, or the sender has closed its end.
        """
        self._watch.wait_for(lambda: bool(self._arrived) or self._over)
        if not self._arrived:
            self._watch.check()
            ended = Failure(self._peer, "", "it has closed its pipeline, and this rank still waits for it")
            raise self._watch.fail(ended).error()
        message = self._arrived.pop(0)
        for tensor in message.tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))  # the link's stream allocated it
        return message

    @property
    def arrived(self) -> bool:
        return bool(self._arrived)

    def close(self, timeout: float) -> bool:
        """Ends the thread after the expected messages have come. It takes no others.

        Args:
            timeout: Seconds to wait for that.

        Returns:
            Whether the thread has ended.
        """
        self._ended = True
        self._expected.release()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        words = torch.empty(PROLOGUE_WORDS, dtype=torch.int64, device="cpu")
        try:
            arriving = self._channel.post_words(words)
            while True:
                self._channel.wait(arriving)
                prologue = Prologue.decode(words)
                if prologue.form is None:
                    return
                form = self._form(prologue.form, prologue.words)
                self._expected.acquire()
                if not self._posted:  # close() has released the semaphore
                    return
                start = time.perf_counter()
                message = prologue.message(self._fetch(form), form)
                self.received_bytes += form.nbytes
                self.log.note(message.batch, message.microbatch, form.nbytes, start)
                with self._watch.changed:
                    self._arrived.append(message)
                    self._watch.changed.notify_all()
                # It comes first since it gives up the interpreter lock, and the thread that computes waits for that.
                arriving = self._channel.post_words(words)
                del message
                with self._posting:
                    if self._posted and self._posted[0] is None:
                        self._posted[0] = self._post_ahead()
        except TransportError as error:
            if not self._ended:
                _peer_ended(self._watch, self._peer, error)
        except Exception as error:  # noqa: BLE001 - threads that wait for the link have to learn of it
            self._watch.fail(Failure(self._watch.rank, f"receiving {self.log.link}", describe_error(error)))
        finally:
            with self._watch.changed:
                self._over = True
                self._watch.changed.notify_all()

    def _form(self, number: int, words: int) -> Form:
        """The form of the next message, which is described in so many words if it is new."""
        form = self._forms.use(number)
        if form is None:
            form = messages.described(self._channel.receive_words(words))
            self._forms.note(number, form)
        with self._posting:
            self._layouts.note(form.present)
        return form

    def _fetch(self, form: Form) -> tuple[Tensor | None, ...]:
        """The tensors of a message."""
        with self._stream, torch.no_grad():
            with self._posting:
                posted = self._posted[0]
                if posted is not None and posted.layout == self._layouts.number:
                    self.received_ahead += 1
                else:
                    self.abandoned += len(posted.works) if posted is not None else 0
                    posted = self._post()
                self._posted.popleft()
            for work in posted.works:
                self._channel.wait(work)
            found = iter(posted.tensors)
            with _C.Uncharged():
                return tuple(
                    None if layout is None else messages.laid_out(next(found), layout, self._device)
                    for layout in form.layouts
                )


class Links:
    """Makes the links of one rank. All ranks call :meth:`connect` for the same pairs in the same order.

    A rank calls it for pairs without itself, too.

    Args:
        device: Where this rank's tensors are.

    Attributes:
        transfers: The last transfers of all links, in the order of their ends; at most ``ROOM``.
        groups: The links' process groups, and the other groups of the pipeline.
        direct: Number of this rank's links whose tensors NCCL carries.
    """

    def __init__(self, rank: int, device: torch.device, watch: Watch) -> None:
        self.transfers: deque[Transfer] = deque(maxlen=ROOM)
        self.direct = 0
        self._rank = rank
        self._device = device
        self._watch = watch
        self.groups = Groups(rank, watch, device)
        self._ends: list[Outbox | Inbox] = []

    def connect(self, source: int, target: int, name: str, *, through_host: bool = False) -> Outbox | Inbox | None:
        """Makes a link, and returns this rank's end; None if it has none.

        Args:
            through_host: Whether its tensors go through the host in any case. They are few and small.
        """
        words = self.groups.make([source, target], "gloo")
        direct = not through_host and self._device.type == "cuda" and backend_of(self._device) == "nccl"
        payload = self.groups.make([source, target], "nccl") if direct else words
        if self._rank not in (source, target) or words is None or payload is None:
            return None
        self.direct += direct
        peer = target if self._rank == source else source
        channel = Channel(words, payload, sorted((source, target)).index(peer), self._device)
        end: Outbox | Inbox
        if self._rank == source:
            log = LinkLog(f"{name} to rank {target}", sent=True, transfers=self.transfers)
            end = Outbox(channel, peer, self._device, self._watch, log)
        else:
            log = LinkLog(f"{name} from rank {source}", sent=False, transfers=self.transfers)
            end = Inbox(channel, peer, self._device, self._watch, log)
        self._ends.append(end)
        return end

    def flush(self) -> None:
        """Returns when all messages that were put have been sent.

        Raises:
            RankFailed: A rank has failed.
        """
        for end in self._ends:
            if isinstance(end, Outbox):
                end.flush()

    def close(self, timeout: float) -> None:
        """Ends all links; messages under way still arrive. All ranks have to call it.

        After a failure it does not wait for other ranks.

        Args:
            timeout: Seconds for each thread to end; after a failure seconds for all of them.
        """
        if self._watch.failure is None:
            for kind in (Outbox, Inbox):
                for end in self._ends:
                    if isinstance(end, kind):
                        end.close(timeout)
            self.groups.destroy()
        else:
            self.groups.abort()
            deadline = time.perf_counter() + timeout
            left = [end.log.link for end in self._ends if not end.close(max(0.0, deadline - time.perf_counter()))]
            if left:
                logger.warning("links of a failed pipeline stay until the process ends: %s", ", ".join(left))
        self._ends.clear()


def _peer_ended(watch: Watch, peer: int, error: TransportError) -> None:
    logger.info("the connection with rank %d has ended: %s", peer, error)
    if watch.failure is None:
        watch.fail(Failure(peer, f"(last seen {watch.last_seen(peer)})", f"its process has ended ({error})"))
