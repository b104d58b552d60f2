/* Producers that may repeat a publish. Under the topic's publish lock (P). */
#ifndef SHMQ_WRITER_H
#define SHMQ_WRITER_H

#include "memory/handles.h"

/* Repair the topic's writers after a death: discard uncommitted marks, complete committed ones. */
void writer_recover(shmq_broker *b, uint32_t topic);
/* The key's entry, or NULL. */
shmq_writer_desc *writer_find(shmq_broker *b, uint32_t topic, const uint64_t key[2]);
/* Find the key's entry, or make one. SHMQ_REPEATED: those messages were published before. SHMQ_AGAIN
 * with *other set: an entry of that topic gives way first, under its P. */
int writer_begin(shmq_broker *b, uint32_t topic, const shmq_sequence *mark, shmq_writer_desc **out,
                 uint32_t *other);
/* Free the entry of `topic` that gives way to a new one of `mine`. P of both is held. */
void writer_give_way(shmq_broker *b, uint32_t topic, uint32_t mine, const shmq_sequence *mark);
void writer_prepare(shmq_writer_desc *w, const shmq_sequence *mark, uint64_t seq);
void writer_commit(shmq_writer_desc *w);

#endif
