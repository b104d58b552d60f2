/* The acts of the actors on one topic, and the steps that set them up. */
#include "stage.h"

stage *k;

/* As everybody sees it; looking is no access that counts. */
shmq_queue_desc *desc(uint32_t queue)
{
	return k->seen[queue]->q;
}

void body_make(uint8_t *body, uint32_t number)
{
	snprintf((char *)body, BODY, "%05u", number);
	for (uint32_t i = 5; i < BODY; i++)
		body[i] = (uint8_t)(number * 7 + i);
}

uint32_t body_number(const shmq_message *m)
{
	uint8_t right[BODY];
	uint32_t number = (uint32_t)strtoul(m->body, NULL, 10);

	body_make(right, number);
	if (m->length != BODY || memcmp(m->body, right, BODY))
		schedule_fail("a body is torn");
	if (number >= MESSAGES || !k->published[number])
		schedule_fail("message %u comes from nowhere", number);
	return number;
}

void publish(uint32_t who, uint32_t n, int64_t due)
{
	actor *a = &k->actors[who];
	uint32_t first = who * EACH + a->next;
	uint8_t data[EACH][BODY];
	shmq_body bodies[EACH];
	uint64_t id;
	int r;

	a->next += n;
	for (uint32_t i = 0; i < n; i++) {
		body_make(data[i], first + i);
		bodies[i] = (shmq_body){data[i], BODY};
		k->published[first + i] = BEGUN;
		k->group[first + i] = (uint8_t)first;
	}
	r = MAPPED(k->w, a->b, shmq_publish(a->p, bodies, n, due, soon(), &id));
	if (r && r != SHMQ_GONE && r != SHMQ_NEED_BACKLOG && r != SHMQ_REJECTED)
		schedule_fail("publish says %s", shmq_status_name(r));
	for (uint32_t i = 0; i < n; i++)
		k->published[first + i] = r ? REFUSED : RETURNED;
}

int64_t in_an_hour(void)
{
	return shmq_realtime() + 3600 * NS_PER_S;
}

int take(uint32_t who, uint32_t queue, uint32_t n)
{
	actor *a = &k->actors[who];
	int r = shmq_take(a->c, a->m, n, soon(), &a->got);

	if (r) {
		a->got = 0;
		if (r != SHMQ_EMPTY && r != SHMQ_GONE)
			schedule_fail("take says %s", shmq_status_name(r));
		return r;
	}
	for (uint32_t i = 0; i < a->got; i++) {
		uint8_t copy[BODY];
		shmq_message m = a->m[i];
		uint32_t number;

		memcpy(copy, m.body, BODY);
		m.body = copy;
		a->number[i] = MESSAGES;
		if (!shmq_message_is_ours(a->c, &a->m[i]))
			continue; /* emptied */
		number = a->number[i] = body_number(&m);
		if (k->finished[queue][number] == TAKEN)
			schedule_fail("message %u is delivered after its finish", number);
	}
	return 0;
}

void finish(uint32_t who, uint32_t queue, uint32_t n)
{
	actor *a = &k->actors[who];
	const uint32_t *numbers = a->number;
	uint8_t ok[16];

	if (n > a->got)
		n = a->got;
	for (uint32_t i = 0; i < n; i++)
		if (numbers[i] < MESSAGES && k->finished[queue][numbers[i]] == OPEN)
			k->finished[queue][numbers[i]] = BEGUN_TO;
	(void)shmq_finish(a->c, a->m, n, ok, soon());
	for (uint32_t i = 0; i < n; i++)
		if (ok[i] && numbers[i] < MESSAGES)
			k->finished[queue][numbers[i]] = TAKEN;
		else if (numbers[i] < MESSAGES && k->finished[queue][numbers[i]] == BEGUN_TO)
			k->finished[queue][numbers[i]] = OPEN;
}

/* Sleep until something comes, n messages in all. */
void take_and_wait(uint32_t who, uint32_t n)
{
	int64_t deadline = shmq_now() + 5 * NS_PER_S;

	while (n) {
		int r = take(who, 0, 1);

		if (!r) {
			finish(who, 0, 1);
			n--;
		} else if (r == SHMQ_GONE || shmq_consumer_wait(k->actors[who].c, deadline) != 0) {
			return;
		}
	}
}

void come(uint32_t who, enum shmq_kind kind)
{
	actor *a = &k->actors[who];

	schedule_as(who);
	a->b = world_attach(k->w, kind);
	for (uint32_t q = 0; q < k->n; q++)
		EQUAL(shmq_broker_map(a->b, k->queue[q], k->serial[q], k->w->queues[k->serial[q]]), 0);
	schedule_as(OUTSIDE);
}

void come_to_publish(uint32_t who)
{
	come(who, SHMQ_AS_CLIENT);
	schedule_as(who);
	EQUAL(shmq_producer_open(k->actors[who].b, k->topic, k->generation, &k->actors[who].p), 0);
	schedule_as(OUTSIDE);
}

void come_to_take(uint32_t who, uint32_t queue)
{
	come(who, SHMQ_AS_CLIENT);
	schedule_as(who);
	k->actors[who].c = world_consumer(k->w, k->actors[who].b, k->queue[queue], k->serial[queue], 8);
	schedule_as(OUTSIDE);
}

void come_to_supervise(uint32_t who)
{
	come(who, SHMQ_AS_SUPERVISOR);
	schedule_as(who);
	EQUAL(shmq_supervise(k->actors[who].b, &k->w->limits, soon()), 0);
	schedule_as(OUTSIDE);
	k->adopt = true;
}

uint32_t make_queue(const char *channel)
{
	static const char *const names[] = {"a", "b", "c"};
	uint32_t q = k->n++;

	k->queue[q] = world_queue(k->w, k->topic, channel ? names[q] : NULL, &k->serial[q]);
	k->seen[q] = world_view(k->w, k->queue[q]);
	k->targets |= 1u << q;
	return q;
}

void begin(uint32_t channels)
{
	k = schedule_alloc(sizeof(*k));
	k->w = world_start(small_limits(256, 64));
	k->topic = world_topic(k->w, "t", &k->generation);
	for (uint32_t i = 0; i < channels; i++)
		make_queue("channel");
	if (!channels)
		make_queue(NULL);
	come_to_publish(EARLY);
}

/* Every ring of queue 0 one step before its indices wrap. */
void about_to_wrap(void)
{
	rings_move(world_view(k->w, k->queue[0]), UINT32_MAX);
}
