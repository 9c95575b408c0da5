// What every module uses of Preact and htm, by one name.
import { h, render } from "./preact.js";
import htm from "./htm.js";

export { render };
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./hooks.js";
export const html = htm.bind(h);
