/* The end of a run: the dead are reaped, and everything is held to the promises. */
#include "stage.h"

void settle(void)
{
	shmq_broker *s = k->w->supervisor;
	uint32_t returned;

	if (k->adopt) {
		bool supervisor_died = false;

		for (uint32_t i = 0; i < ACTORS; i++)
			supervisor_died |= k->actors[i].b && schedule_is_dead(i) && !k->actors[i].p &&
			                   !k->actors[i].c;
		if (supervisor_died) {
			EQUAL(shmq_supervise(s, &k->w->limits, soon()), 0);
			for (uint32_t q = 0; q < ld(&s->d->queues_committed); q++)
				if (ld(&s->entries[q].state) == SHMQ_ENTRY_LIVE)
					EQUAL(MAPPED(k->w, s, shmq_adopt(s, q, soon())), 0);
		}
	}
	world_reap(k->w, s, &returned);
}

bool asleep(uint32_t who)
{
	shmq_queue_desc *q = desc(0);

	if (!k->actors[who].c && has_policy(k->seen[0], SHMQ_POLICY_LIMITS))
		return !limits_leave(k->seen[0], 1, BODY); /* a publisher */
	return (q->ready_head == q->ready_tail || on_disk(q)) && q->requeue_head == q->requeue_tail;
}

bool load_chunk(shmq_broker *b)
{
	uint64_t read = desc(0)->deferred_read, at = 0, bytes = 0;
	uint32_t next = read >> SHMQ_CHUNK_SHIFT == 1 ? (uint32_t)(read & 0xffffff) : 0, taken;
	int r;

	if (!desc(0)->deferred_write || desc(0)->deferred_gone || next >= k->chunk_count)
		return false;
	for (uint32_t i = 0; i < k->chunk_count; i++)
		*(i < next ? &at : &bytes) += k->chunk_lengths[i];
	r = shmq_chunk_load(b, k->queue[0],
	                    &(shmq_chunk_records){.data = k->chunk + at,
	                                          .length = bytes,
	                                          .dues = k->chunk_dues + next,
	                                          .n = k->chunk_count - next,
	                                          .position = UINT64_C(1) << SHMQ_CHUNK_SHIFT | next},
	                    soon(), &taken);
	return !r && taken;
}

static void drain(uint32_t q, uint8_t *seen)
{
	shmq_broker *s = k->w->supervisor;
	shmq_consumer *c = world_consumer(k->w, s, k->queue[q], k->serial[q], 1000);
	uint32_t last[ACTORS + 1] = {0}, got, expired, due, taken;
	uint64_t used;
	bool timed = false;
	shmq_message m[16];

	k->seen[q] = world_view(k->w, k->queue[q]);
	if (k->leases) /* their time is over */
		EQUAL(shmq_expire(s, k->queue[q], &(shmq_expiry){.now = INT64_MAX - 1, .limit = 1000},
		                  soon(), &expired, &due),
		      0);
	for (;;) {
		int r = shmq_take(c, m, 16, soon(), &got);

		if (r == SHMQ_EMPTY && desc(q)->disk_read != desc(q)->disk_write) {
			uint64_t from = desc(q)->disk_read, to = desc(q)->disk_write;

			CHECK(to <= sizeof(k->disk));
			EQUAL(shmq_restore(s, k->queue[q],
			                   &(shmq_records){.data = k->disk + from,
			                                   .length = to - from,
			                                   .position = from,
			                                   .next_position = to},
			                   soon(), &taken, &used),
			      0);
			CHECK(taken);
			continue;
		}
		if (r == SHMQ_EMPTY) {
			EQUAL(shmq_expire(s, k->queue[q], &(shmq_expiry){.realtime = INT64_MAX, .limit = 1000},
			                  soon(), &expired, &due),
			      0);
			timed = true;
			if (due || (q == 0 && load_chunk(s)))
				continue;
			break;
		}
		EQUAL(r, 0);
		for (uint32_t i = 0; i < got; i++) {
			uint32_t number = body_number(&m[i]), who = number / EACH;

			if (seen[number]++)
				schedule_fail("queue %u: message %u comes twice", q, number);
			if (!k->out_of_order && !timed && last[who] > number)
				schedule_fail("queue %u: message %u comes behind %u", q, number, last[who]);
			last[who] = number;
		}
		EQUAL(shmq_finish(c, m, got, NULL, soon()), 0);
	}
	EQUAL(shmq_consumer_close(c, soon()), 0);
	EQUAL(ring_count(&desc(q)->free_head, &desc(q)->free_tail), desc(q)->slots_committed);
}

static void check_fates(void)
{
	uint32_t here[MESSAGES] = {0}, lacks[MESSAGES] = {0};

	for (uint32_t q = 0; q < k->n; q++) {
		uint8_t seen[MESSAGES] = {0};

		if (ld(&k->w->supervisor->entries[k->queue[q]].state) != SHMQ_ENTRY_LIVE)
			continue;
		drain(q, seen);
		for (uint32_t i = 0; i < MESSAGES; i++) {
			bool is_here = seen[i] || k->finished[q][i] != OPEN;

			if (seen[i] && k->finished[q][i] == TAKEN)
				schedule_fail("queue %u: message %u comes back after its finish", q, i);
			if (seen[i] && k->published[i] == REFUSED)
				schedule_fail("queue %u: message %u was refused, and is there", q, i);
			if (k->dropped[q] || !(k->targets >> q & 1) || k->published[i] == NOT)
				continue;
			if (!k->late[q] && k->published[i] == RETURNED && !is_here)
				schedule_fail("queue %u: message %u is lost", q, i);
			if (is_here)
				here[k->group[i]]++;
			else if (!k->late[q])
				lacks[k->group[i]]++;
		}
	}
	for (uint32_t i = 0; i < MESSAGES; i++)
		if (here[i] && lacks[i])
			schedule_fail("the publish of message %u is there %u times and lacks %u times", i,
			              here[i], lacks[i]);
}

/* The first locker repairs; then no lock is held, and nothing is left to repair. */
static void check_locks(void)
{
	shmq_broker *b = k->w->supervisor;
	shmq_topic_desc *t = &b->topics[k->topic];

	EQUAL(registry_lock(b, soon()), 0);
	registry_unlock(b);
	EQUAL(MAPPED(k->w, b, topic_lock(b, t, soon())), 0);
	topic_unlock(t);
	for (uint32_t q = 0; q < k->n; q++) {
		int r;

		if (ld(&b->entries[k->queue[q]].state) != SHMQ_ENTRY_LIVE)
			continue;
		r = queue_lock(b, world_view(k->w, k->queue[q]), soon());
		EQUAL(r, 0);
		queue_unlock(world_view(k->w, k->queue[q]));
	}
}

static void sound(void)
{
	for (uint32_t q = 0; q < k->n; q++) {
		const char *wrong = "";

		if (ld(&k->w->supervisor->entries[k->queue[q]].state) == SHMQ_ENTRY_LIVE)
			wrong = checker_queue(k->w->supervisor->base, world_view(k->w, k->queue[q])->base);
		if (*wrong)
			schedule_fail("queue %u: %s", q, wrong);
	}
}

void pump(shmq_broker *b)
{
	uint32_t moved;
	int r;

	do
		r = MAPPED(k->w, b, shmq_pump(b, k->topic, k->generation, 2, soon(), &moved));
	while (!r && moved);
}

void verify(void)
{
	/* The messages of a dead consumer come back in no order. */
	for (uint32_t i = 0; i < ACTORS; i++)
		k->out_of_order |= schedule_is_dead(i) && k->actors[i].c;
	check_locks();
	sound();
	if (ld(&k->w->supervisor->entries[k->queue[0]].state) == SHMQ_ENTRY_LIVE)
		EQUAL(shmq_channel_pause(k->w->supervisor, k->queue[0], k->serial[0], false, soon()), 0);
	if (k->pumps)
		pump(k->w->supervisor);
	for (uint32_t i = 0; i < ACTORS; i++) {
		if (!k->actors[i].b || schedule_is_dead(i))
			continue;
		schedule_as(i);
		EQUAL(MAPPED(k->w, k->actors[i].b, shmq_broker_detach(k->actors[i].b, soon())), 0);
		schedule_as(OUTSIDE);
	}
	sound();
	check_fates();
	sound();
	if (!ld(&k->w->supervisor->topics[k->topic].state))
		return;
	memset(k->finished, 0, sizeof(k->finished));
	memset(k->published, 0, sizeof(k->published));
	memset(k->dropped, 0, sizeof(k->dropped));
	memset(k->late, 0, sizeof(k->late));
	k->actors[EARLY].next = 0;
	publish(EARLY, 2, 0);
	sound();
	check_fates();
}
