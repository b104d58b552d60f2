/* Every set of deviations within the bounds, each in a run of its own from the same beginning. */
#include "scheduler.h"

#include <stdio.h>

static outcome result;

static void tell(uint32_t n)
{
	size_t at = (size_t)snprintf(result.wrong, sizeof(result.wrong), "%s (", failure);

	for (uint32_t i = 0; i < n && at < sizeof(result.wrong); i++) {
		deviation d = plan[i];

		at += (size_t)snprintf(result.wrong + at, sizeof(result.wrong) - at, "%s%u:", i ? " " : "",
		                       d.point);
		if (at < sizeof(result.wrong))
			at += (size_t)snprintf(result.wrong + at, sizeof(result.wrong) - at,
			                       d.what == DIE     ? "dies"
			                       : d.what == DELAY ? "delays"
			                                         : "to %u",
			                       d.to);
	}
	if (at < sizeof(result.wrong))
		snprintf(result.wrong + at, sizeof(result.wrong) - at, ")");
}

static bool enough(const bounds *b)
{
	if (b->most && result.runs >= b->most) {
		result.whole = false;
		return true;
	}
	return *result.wrong != 0;
}

static void search(uint32_t n, bounds b)
{
	alternatives *mine;
	uint32_t last, first = n ? plan[n - 1].point + 1 : 1;

	if (enough(&b))
		return;
	result.runs++;
	if (!run(n)) {
		tell(n);
		return;
	}
	last = point;
	if (last > result.points)
		result.points = last;
	if (n == DEVIATIONS || last < first)
		return;
	mine = malloc((last - first + 1) * sizeof(*mine));
	memcpy(mine, trace + first, (last - first + 1) * sizeof(*mine));
	for (uint32_t p = first; p <= last && !enough(&b); p++) {
		alternatives a = mine[p - first];

		for (uint32_t to = 0; to < ACTORS; to++) {
			bounds less = b;

			if (!(a.to >> to & 1) || (!a.forced && !b.switches))
				continue;
			less.switches -= !a.forced;
			plan[n] = (deviation){p, SWITCH, (uint8_t)to};
			search(n + 1, less);
		}
		if (a.dies && b.deaths) {
			bounds less = b;

			less.deaths--;
			plan[n] = (deviation){p, DIE, 0};
			search(n + 1, less);
		}
		if (a.store && a.to && b.delays) {
			bounds less = b;

			less.delays--;
			plan[n] = (deviation){p, DELAY, 0};
			search(n + 1, less);
		}
	}
	free(mine);
}

outcome schedule_search(const scenario *s, bounds b)
{
	current = s;
	conflicts_forget();
	deaths = 0;
	memset(&result, 0, sizeof(result));
	do {
		conflicts_grew = false;
		result.whole = true;
		search(0, b);
	} while (conflicts_grew && !enough(&b));
	result.deaths = deaths;
	current = NULL;
	return result;
}

void schedule_reset(void)
{
	memory_forget();
	locks_forget();
	me = OUTSIDE;
	for (uint32_t i = 0; i < ACTORS; i++)
		actors[i].killed = false;
}
