# SPDX-License-Identifier: Apache-2.0
"""Offline capture of a set of prompts: `dmi run`.

Modules, in the order in which a prompt passes them:

    sources      reads the input row by row: JSON lines, Parquet, or a saved Hugging Face data set
    order        gives each row a position, in the order of the input or shuffled; applies --limit and --shard
    prompts      turns a row into a prompt, or rejects it with a reason
    run          submits prompts to engines that have room, and waits for the store of each prompt
    engines      starts processes with one engine each (engine_process; engine/offline/feed.py calls vLLM)
    engine_log   finds the cause of an engine's failure in its log
    manifest     writes one line for each prompt whose store is complete

The key of a prompt's store is RUN-POSITION: the name of the run, and the position of the prompt. So the names of the
stores and the lines of the manifest show which prompts a killed run has not captured. A run that is started again first
waits until all engine processes of the killed run have exited. What happens to a prompt then depends on its store and
its line in the manifest (recovery). An uploaded store counts too:

    store                                   line      what happens
    finished                                yes       done: the store is not checked
    complete and undamaged                  no        done: its line is added when the row is read again
    unfinished, incomplete or damaged       no        removed; the prompt is captured again
    none                                    yes       done: the user has removed the store (see --redo-missing)
    none                                    no        the prompt is captured again

Three locks protect a run. The process of `dmi run` holds `.run.lock` exclusively, so that no other process works on
the same share of the rows (--shard). It also holds a shared lock on `.settings.lock`, so that the settings of an active
run are not replaced. All processes of its engines hold a shared lock on `.life.lock` until they exit
(store/format/locks.py). Engine processes exit with `dmi run`, even if it is killed. Writers exit after they have
written the rows that they received.
"""
