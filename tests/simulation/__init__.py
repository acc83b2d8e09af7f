"""Deterministic simulation of the commit protocol: the project's own code under a simulated Ray, Spark and object store.

One seed is one schedule: which party goes on at each storage or message step, what the storage answers, who dies, who is
replaced while it sleeps and wakes up later. Nothing waits, and the same seed gives the same trace.

- ``scheduler.py``: parties and fibers, one of which runs at a time
- ``event_loop.py``: asyncio for the coordinator, without threads or clock
- ``cluster.py``: Ray: named actors, their lives, messages
- ``storage.py``: an object store that loses answers
- ``workload.py``, ``rescaling.py``, ``keyed.py``: the input of each batch and what the serial model makes of it: of a query that
  aggregates, or, every third seed, one that keeps two keyed stores
- ``spark.py``: drivers, executors, task attempts, the commit log
- ``beside.py``, ``reading.py``: what goes on beside the batches: moves, rescales, drops, reads
- ``audit.py``: what must hold
- ``world.py``: one schedule; ``planted.py``: bugs that must be found; ``survey.py``: many schedules

Of continuous queries, in the same world:

- ``streaming.py``: source and Spark's logs, and the model of an aggregation without event time
- ``event_time.py``: the models of watermarks, and of windows
- ``state_rows.py``: the audits of rows; ``held.py``, ``sessions.py``, ``first_rows.py``: the models of rows that are held until an
  epoch is sealed, of sessions, and of rows that are not duplicates
- ``called.py``: a user's function, and its model; ``callers.py``: the Python workers that call it
- ``sinks.py``: what was emitted
- ``continuous.py``: drivers, runs and epochs; ``epoch_tasks.py``: their tasks
- ``epoch_connections.py``: what goes on between tasks and shards
- ``continuous_world.py``: one schedule; ``planted_epochs.py``: bugs that must be found
"""
