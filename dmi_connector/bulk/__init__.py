# SPDX-License-Identifier: Apache-2.0
"""Offline capture of a whole set of prompts: `dmi run`.

The way of a prompt:

    sources      reads rows of the input one by one: JSON lines, Parquet, a data set saved by Hugging Face's library
    order        gives each row a position: the order of the input, or a permutation; a limit; a share
    prompts      makes a prompt of a row, or says why that cannot be done (rejects)
    run          hands prompts to engines as these have room, and waits for the store of each
    engines      processes with an engine each (engine_process; engine/offline/feed.py talks to vLLM)
    engine_log   why an engine ended, from its log
    manifest     one line for each prompt whose store is whole

The position of a prompt is in the key of its store: RUN-POSITION. So what a killed run has left can be told from the
names of stores and the manifest alone. A run that starts again (recovery) waits until no process of the killed one
lives, looks at both, and goes on:

    store                                   line      what happens
    complete and sound                      yes       done
    complete and sound                      no        done: its line is added when the row is read again
    unfinished, incomplete or damaged       no        removed, done again
    none                                    yes       done: somebody has removed the store
    none                                    no        done again

Three locks make that safe. A run holds `.run.lock` alone, so that no other run works on the same share. All processes
that its engines consist of hold `.life.lock` together, until the last one has ended (store/format/locks.py). Runs hold
`.settings.lock` together: nobody replaces the settings of a run that is alive. Engine processes end with the run, also
when it is killed; writers finish first what they can.
"""
