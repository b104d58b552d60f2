/* Slots and bodies that a producer fills outside the publish lock (P). */
#ifndef SHMQ_LOAN_H
#define SHMQ_LOAN_H

#include "memory/handles.h"
#include "publish/fanout.h"
#include "publish/producer.h"

struct shmq_loan {
	shmq_producer *p;
	uint32_t n;
	bool open;
	int64_t expires; /* CLOCK_REALTIME ns; 0: by the queues' settings alone */
	uint64_t *lengths;
	uint32_t *blocks; /* of those, bytes of properties; NULL: no message has any */
	/* The producer fills these: the bodies of the first target, or `scratch`. */
	shmq_body *bodies;
	/* Used if every channel was ephemeral and full, so that there is no slot to fill. */
	uint8_t *scratch;
	lent *lent;
	uint32_t targets; /* of `lent`, how many have slots */
	uint32_t made;    /* and how many have arrays */
};

/* blocks: of each length, how many bytes are properties; NULL: none. due: not 0 if the messages are to
 * be deferred. */
int loan_begin(shmq_producer *p, const uint64_t *lengths, const uint32_t *blocks, uint32_t n,
               int64_t due, int64_t until, shmq_loan **out);
/* The buffer for the properties and the body of message i. */
uint8_t *loan_body(shmq_loan *loan, uint32_t i);

#endif
