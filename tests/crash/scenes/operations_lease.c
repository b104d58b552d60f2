/* Leases, of messages in memory and on disk. */
#include "operations.h"

#include <string.h>

static void lease_holder_open(scene *s, shmq_broker *b)
{
	EQUAL(CALL(s, b,
	           shmq_lease_holder_open(
					   b, first_queue(s), s->ledger->queue[0].serial,
					   &(shmq_lease_settings){.name = "reader", .ttl_ns = SECOND, .grace_ns = 1},
					   soon(), &s->holder)),
	      0);
}

static void lease(scene *s, shmq_broker *b, uint32_t n)
{
	EQUAL(WATCHED(shmq_lease_take(
				  b, &s->holder,
				  &(shmq_lease_wish){
					  .parent = s->lease.id, .max_bytes = UINT64_MAX, .n = n, .parts = 2},
				  soon(), &s->lease)),
	      0);
	EQUAL(s->lease.count, n);
}

static void come_to_lease(scene *s)
{
	come(s);
	lease_holder_open(s, s->mine);
}

static void come_and_lease(scene *s)
{
	come_to_lease(s);
	lease(s, s->mine, 2);
	lease(s, s->mine, 1);
}

void lease_alive(scene *s)
{
	lease_holder_open(s, s->alive);
	lease(s, s->alive, 2);
	lease(s, s->alive, 1);
}

static void lease_holder_open_again(scene *s)
{
	EQUAL(CALL(s, s->mine, shmq_lease_holder_adopt(s->mine, &s->holder, soon())), 0);
	lease_holder_open(s, s->mine);
	EQUAL(WATCHED(shmq_lease_holder_touch(s->mine, &s->holder, soon())), 0);
	EQUAL(WATCHED(shmq_lease_holder_close(s->mine, &s->holder, soon())), 0);
}

static const shmq_lease_settings of_somebody = {.name = "elsewhere",
                                                .ttl_ns = 60 * SECOND,
                                                .grace_ns = 60 * SECOND,
                                                .whose = 7,
                                                .proof = {1, 2},
                                                .most = 4};

static const shmq_lease_holder_desc *holders_of(const scene *s)
{
	const shmq_queue_desc *q = queue_of(s, 0);

	return (const void *)((const uint8_t *)q + q->lease_holders_at);
}

static void somebody_holds(scene *s)
{
	EQUAL(CALL(s, s->alive,
	           shmq_lease_holder_open(s->alive, first_queue(s), s->ledger->queue[0].serial,
	                                  &of_somebody, soon(), &s->holder)),
	      0);
}

/* Another client asks for the name, with half of the secret, and is refused. */
static void open_with_a_wrong_secret(scene *s)
{
	shmq_lease_settings settings = of_somebody;
	shmq_lease_holder holder;

	settings.whose = 8;
	settings.known = true;
	settings.proof[1] = 3;
	EQUAL(CALL(s, s->mine,
	           shmq_lease_holder_open(s->mine, first_queue(s), s->ledger->queue[0].serial,
	                                  &settings, soon(), &holder)),
	      SHMQ_LEASE_FENCED);
}

/* It is its owner's still, wherever the other one died. */
static void nobody_took_the_name(scene *s)
{
	const shmq_lease_holder_desc *l = &holders_of(s)[s->holder.index];

	CHECK(l->state == 1 && l->incarnation == s->holder.incarnation);
	CHECK(l->whose == 7 && l->proof[0] == 1 && l->proof[1] == 2);
	EQUAL(shmq_lease_holder_touch(s->alive, &s->holder, soon()), 0);
}

/* A name that can be found is proven by the whole secret. */
static void names_are_proven(scene *s)
{
	for (uint32_t i = 0; i < SHMQ_LEASE_HOLDERS; i++) {
		const shmq_lease_holder_desc *l = &holders_of(s)[i];

		if (l->state && !strcmp(l->name, "elsewhere"))
			CHECK(l->whose == 7 && l->proof[0] == 1 && l->proof[1] == 2);
	}
	leases_are_whole(s);
}

/* A holder on the network, whose gateway leaves it and then opens the name again with its secret. */
static void open_for_somebody(scene *s)
{
	uint32_t queue = first_queue(s);
	uint64_t serial = s->ledger->queue[0].serial;
	shmq_lease_holder holder;

	EQUAL(CALL(s, s->mine,
	           shmq_lease_holder_open(s->mine, queue, serial, &of_somebody, soon(), &holder)),
	      0);
	EQUAL(WATCHED(shmq_lease_holder_leave(s->mine, &holder, soon())), 0);
	EQUAL(WATCHED(shmq_lease_holder_open(s->mine, queue, serial, &of_somebody, soon(), &holder)),
	      0);
}

static void lease_three(scene *s)
{
	lease(s, s->mine, 3);
}

static void look_at_leases(scene *s)
{
	shmq_lease found[2];
	uint32_t count;

	EQUAL(WATCHED(shmq_lease_list(s->mine, &s->holder, found, 2, soon(), &count)), 0);
	EQUAL(count, 2);
	EQUAL(WATCHED(shmq_lease_look(s->mine, &s->holder, s->lease.id, true, soon(), found)), 0);
	EQUAL(WATCHED(shmq_lease_wait(s->mine, &s->holder, shmq_now())), 0);
}

static void finish_leases(scene *s)
{
	uint64_t messages;

	for (uint32_t i = 0; i < 3; i++)
		s->ledger->fate[0][i] = EITHER;
	EQUAL(WATCHED(shmq_lease_finish(s->mine, &s->holder, s->lease.id, soon(), &messages)), 0);
	EQUAL(messages, 3);
	for (uint32_t i = 0; i < 3; i++)
		s->ledger->fate[0][i] = DONE;
}

static void return_leases(scene *s)
{
	uint64_t messages;

	EQUAL(WATCHED(shmq_lease_return(s->mine, &s->holder, s->lease.id, soon(), &messages)), 0);
	EQUAL(messages, 1);
	EQUAL(WATCHED(shmq_lease_return(s->mine, &s->holder, s->lease.parent, soon(), &messages)), 0);
	EQUAL(messages, 2);
}

static void end_leases(scene *s)
{
	uint64_t messages;

	EQUAL(WATCHED(shmq_lease_end(s->mine, first_queue(s), s->ledger->queue[0].serial, s->lease.id,
	                             true, soon(), &messages)),
	      0);
	s->ledger->fate[0][0] = s->ledger->fate[0][1] = EITHER;
	EQUAL(WATCHED(shmq_lease_end(s->mine, first_queue(s), s->ledger->queue[0].serial,
	                             s->lease.parent, false, soon(), &messages)),
	      0);
	s->ledger->fate[0][0] = s->ledger->fate[0][1] = DONE;
}

static void expire_leases(scene *s)
{
	uint32_t expired, due;

	EQUAL(WATCHED(shmq_expire(s->mine, first_queue(s),
	                          &(shmq_expiry){.now = shmq_now() + 100 * SECOND, .limit = 100},
	                          soon(), &expired, &due)),
	      0);
	EQUAL(queue_of(s, 0)->leased, 0);
}

/* A lease is whole: it has as many messages as it says, each once, and its parts make up all of it. */
void leases_are_whole(scene *s)
{
	const shmq_queue_desc *q = queue_of(s, 0);
	const shmq_lease_desc *leases = (const void *)((const uint8_t *)q + q->leases_at);
	const shmq_slot_desc *slots = (const void *)((const uint8_t *)q + q->slots_at);
	uint32_t leased = 0;

	for (uint32_t i = 0; q->leases_committed && i < SHMQ_LEASES; i++) {
		uint32_t slot = leases[i].first[0], n = 0;

		if (!leases[i].word)
			continue;
		EQUAL(leases[i].word & 0xff, SHMQ_LEASE_HELD);
		for (; slot < q->slots_committed && n <= leases[i].count; slot = slots[slot].next, n++) {
			EQUAL(slots[slot].word & 0xff, SHMQ_LEASED);
			EQUAL(slots[slot].move, leases[i].word >> 8);
			EQUAL(slots[slot].turn, n);
			for (uint32_t p = 0; p < leases[i].parts; p++)
				if (n == p * leases[i].count / leases[i].parts)
					EQUAL(leases[i].first[p], slot);
		}
		EQUAL(n, leases[i].count);
		leased += n;
	}
	EQUAL(q->leased, leased);
	if (q->run.lease) {
		EQUAL(leases[q->run.lease % SHMQ_LEASES].word, q->run.lease << 8 | SHMQ_LEASE_HELD);
		EQUAL(leases[q->run.lease % SHMQ_LEASES].on_disk, q->run.count);
		EQUAL(q->run.from, q->disk_read);
	}
}

/* Lease the four that came back, and the six after them where they are on disk. */
static void lease_on_disk(scene *s)
{
	uint64_t at[2] = {0, s->spill.positions[3]};
	shmq_run run = {0, s->ledger->written, 6 * SMALL, 6, 2, at};

	EQUAL(WATCHED(shmq_lease_take(
				  s->mine, &s->holder,
				  &(shmq_lease_wish){.max_bytes = UINT64_MAX, .n = 64, .parts = 2, .run = &run},
				  soon(), &s->lease)),
	      0);
	EQUAL(s->lease.count, 10);
	EQUAL(s->lease.on_disk, 6);
}

static void come_to_lease_on_disk(scene *s)
{
	come_and_spill(s);
	lease_holder_open(s, s->mine);
}

static void come_and_lease_on_disk(scene *s)
{
	come_to_lease_on_disk(s);
	lease_on_disk(s);
}

static void finish_what_is_on_disk(scene *s)
{
	uint64_t messages;

	for (uint32_t i = 0; i < 10; i++)
		s->ledger->fate[0][i] = EITHER;
	EQUAL(WATCHED(shmq_lease_finish(s->mine, &s->holder, s->lease.id, soon(), &messages)), 0);
	EQUAL(messages, 10);
	for (uint32_t i = 0; i < 10; i++)
		s->ledger->fate[0][i] = DONE;
}

static void return_what_is_on_disk(scene *s)
{
	uint64_t messages;

	EQUAL(WATCHED(shmq_lease_return(s->mine, &s->holder, s->lease.id, soon(), &messages)), 0);
	EQUAL(messages, 10);
}

void somebody_died_leasing(scene *s)
{
	a_death(s, come_and_lease, 0);
}

static const operation table[] = {
	{"open and close a lease holder", 1, lease_alive, come, lease_holder_open_again,
	 leases_are_whole, 0, 0, 0},
	{"open a lease holder for somebody", 1, lease_alive, come, open_for_somebody, names_are_proven,
	 0, 0, 0},
	{"open a lease holder with a wrong secret", 1, somebody_holds, come, open_with_a_wrong_secret,
	 nobody_took_the_name, 0, 0, 0},
	{"lease", 1, NULL, come_to_lease, lease_three, leases_are_whole, 0, 0, 0},
	{"lease what came back", 1, some_came_back, come_to_lease, lease_three, leases_are_whole, 0, 1,
	 0},
	{"look at leases", 1, NULL, come_and_lease, look_at_leases, leases_are_whole, 0, 0, 0},
	{"finish leases", 1, NULL, come_and_lease, finish_leases, leases_are_whole, 0, 0, 0},
	{"return leases", 1, NULL, come_and_lease, return_leases, leases_are_whole, 0, 0, 0},
	{"end leases", 1, NULL, come_and_lease, end_leases, leases_are_whole, 0, 0, 0},
	{"expire leases", 1, lease_alive, come_to_supervise, expire_leases, leases_are_whole, 1, 0, 0},
	{"lease what is on disk", 1, eight_more, come_to_lease_on_disk, lease_on_disk, leases_are_whole,
	 1, 0, 0},
	{"finish what is on disk", 1, eight_more, come_and_lease_on_disk, finish_what_is_on_disk,
	 leases_are_whole, 1, 0, 0},
	{"return what is on disk", 1, eight_more, come_and_lease_on_disk, return_what_is_on_disk,
	 leases_are_whole, 1, 0, 0},
};

const operations lease_operations = {table, sizeof(table) / sizeof(table[0])};
