"""An independent simulation of a step in small steps of time, for the tests of the timeline."""

from jaxcomm.scheduling import AlphaBeta, LayerTimes, Plan

TICK = 0.125


def step_seconds(times: LayerTimes, link: AlphaBeta, plan: Plan) -> float:
    """The seconds of a step whose parts all take whole ticks."""
    layers, groups = len(times), range(len(plan.groups))
    computed = encoded = 0  # layers of the backward pass; messages, in the order of their ends
    by_end = sorted(groups, key=lambda g: max(plan.groups[g]))
    since = [float("inf")] * len(plan.groups)  # when a message was ready
    left_parts = list(plan.parts)
    done: set[int] = set()
    forward = layers
    now = 0.0
    compute = send = None  # (what, remaining seconds)

    def wants() -> tuple[str, int, float] | None:
        """What the compute stream does next."""
        nonlocal computed
        due = [g for g in by_end[encoded:] if max(plan.groups[g]) < computed]
        if due:
            return "encode", due[0], sum(times.encode[i] for i in plan.groups[due[0]])
        if computed < layers:
            return "backward", computed, times.backward[computed]
        owner = next((g for g in groups if forward - 1 in plan.groups[g]), None)
        may = len(done) == len(plan.groups) if plan.barrier else owner in done
        if forward and may:
            return "forward", forward - 1, times.forward[forward - 1]
        here = [g for g in groups if not left_parts[g] and g not in done]
        if here:
            first = sorted(here, key=lambda g: -max(plan.groups[g]))[0]
            return "decode", first, sum(times.decode[i] for i in plan.groups[first])
        return None

    def finish(what: str, number: int) -> None:
        nonlocal computed, encoded, forward
        if what == "backward":
            computed += 1
        elif what == "encode":
            encoded += 1
            since[number] = now
        elif what == "decode":
            done.add(number)
        else:
            forward -= 1

    while True:
        if send and send[1] <= 0:
            left_parts[send[0]] -= 1
            send = None
        while compute is None or compute[2] <= 0:
            if compute:
                finish(*compute[:2])
            compute = wants()
            if compute is None:
                break
        if not send:
            backward_ends = computed == layers and encoded == len(plan.groups)
            ready = [
                g
                for g in groups
                if left_parts[g] and since[g] <= now and (plan.overlap or backward_ends)
            ]
            if ready:
                g = min(
                    ready, key=lambda g: (plan.priorities[g], since[g] if plan.overlap else 0, g)
                )
                size = sum(plan.sizes[i] for i in plan.groups[g]) / plan.parts[g]
                send = [g, link.latency + size / link.bytes_per_second]
        if not forward and len(done) == len(plan.groups):
            return now
        now += TICK
        if compute:
            compute = (*compute[:2], compute[2] - TICK)
        if send:
            send[1] -= TICK
