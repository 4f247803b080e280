"""hivemind's all-reduce of 25 M f32 over four processes on loopback: the sum alone, after the group stands.

Prints the median of some rounds, each the longest of the four, in seconds.
"""

import asyncio
import multiprocessing
import statistics
import time

PEERS = 4
ELEMENTS = 25_000_000
ROUNDS = 5


async def work(index, addresses, ids, gate, times):
    import torch
    from hivemind.averaging.allreduce import AllReduceRunner
    from hivemind.p2p import P2P, PeerID

    torch.set_num_threads(1)
    first = addresses.get() if index else None
    p2p = await P2P.create(initial_peers=first)
    if not index:
        visible = [str(address) for address in await p2p.get_visible_maddrs()]
        for _ in range(PEERS - 1):
            addresses.put(visible)
    ids[index] = p2p.peer_id.to_base58()
    gate.wait()
    everybody = tuple(PeerID.from_base58(ids[peer]) for peer in range(PEERS))
    tensor = torch.full((ELEMENTS,), float(index))
    for number in range(ROUNDS):
        runner = AllReduceRunner(
            p2p=p2p,
            servicer_type=AllReduceRunner,
            prefix=f"round{number}",
            group_id=number.to_bytes(8, "big"),
            tensors=[tensor],
            ordered_peer_ids=everybody,
            peer_fractions=(1 / PEERS,) * PEERS,
        )
        await runner.add_p2p_handlers(p2p, namespace=f"round{number}")
        await asyncio.sleep(1)
        await asyncio.get_running_loop().run_in_executor(None, gate.wait)
        began = time.perf_counter()
        average = tensor.clone()
        async for delta in runner:
            average += delta
        times.put((number, time.perf_counter() - began))
        assert abs(average[7].item() - sum(range(PEERS)) / PEERS) < 1e-5, "it did not average"
        await asyncio.get_running_loop().run_in_executor(None, gate.wait)
    await p2p.shutdown()


def process(*arguments):
    asyncio.run(work(*arguments))


def main():
    context = multiprocessing.get_context("spawn")
    addresses, times = context.Queue(), context.Queue()
    ids, gate = context.Manager().dict(), context.Barrier(PEERS)
    peers = [context.Process(target=process, args=(i, addresses, ids, gate, times)) for i in range(PEERS)]
    for peer in peers:
        peer.start()
    rounds = [0.0] * ROUNDS
    for _ in range(PEERS * ROUNDS):
        number, seconds = times.get(timeout=300)
        rounds[number] = max(rounds[number], seconds)
    for peer in peers:
        peer.join()
    print(statistics.median(rounds))


if __name__ == "__main__":
    main()
