/* Producers that may repeat a publish. Under the topic's publish lock (P). */
#ifndef SHMQ_WRITER_H
#define SHMQ_WRITER_H

#include "handles.h"

/* Repair the topic's writers after a death: discard uncommitted marks, complete committed ones. */
void writer_recover(shmq_broker *b, uint32_t topic);
/* Find the key's entry, or make one. SHMQ_REPEATED: those messages were published before. */
int writer_begin(shmq_broker *b, uint32_t topic, const shmq_sequence *mark, shmq_writer_desc **out);
void writer_prepare(shmq_writer_desc *w, const shmq_sequence *mark, uint64_t seq);
void writer_commit(shmq_writer_desc *w);

#endif
