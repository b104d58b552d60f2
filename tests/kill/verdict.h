/* What becomes of a scene in which somebody has died: repaired by whoever comes first, then seen. */
#ifndef VERDICT_H
#define VERDICT_H

#include "image.h"
#include "scene.h"

/* Who comes first after a death. */
enum comer { THE_REAPER, A_PUBLISHER, A_CONSUMER, COMERS };

/* Who comes and repairs; to be called in a process of its own. */
void repair(scene *s, enum comer first);
/*
 * Repair, then hold everything to its promises, in a forked child; `others`: who lives on (until,
 * half-way, they die too). The scene's bytes are used up. False: wrong_words say why.
 */
bool verdict(const scene *s, enum comer first, const marks *others);

#endif
