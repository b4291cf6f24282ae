// A further thread of a team: computes its share of every part of a text that the engine orders.

import { Runner, Team } from "./runner.js";

onmessage = ({ data: { plan, memory, sync, index, threads } }) => {
  const team = new Team(new Int32Array(memory.buffer, sync, 64), index, threads);
  const runner = new Runner(plan, memory, team);
  postMessage("ready");
  for (;;) runner.run(...team.wait());
};
