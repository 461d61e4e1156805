// Every view has an address: a path and parameters, or, in a page that is one file, the same behind a #.
import { useEffect, useState } from "preact/hooks";
import { embedded } from "./api";

export interface Route {
  page: string;
  params: URLSearchParams;
}

const CHANGED = "posttrain:route";

export function current(): Route {
  const text = embedded ? location.hash.replace(/^#/, "") || "/overview" : location.pathname + location.search;
  const [path, search = ""] = text.split("?", 2) as [string, string?];
  return { page: path.replace(/^\/+/, "") || "overview", params: new URLSearchParams(search) };
}

export function address(page: string, params: Record<string, string | number | string[] | undefined | null>): string {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== undefined && each !== null && each !== "") search.append(name, String(each));
    }
  }
  const text = search.toString();
  return `${embedded ? "#" : ""}/${page}${text ? `?${text}` : ""}`;
}

export function go(to: string, replace = false): void {
  if (replace) history.replaceState(null, "", to);
  else history.pushState(null, "", to);
  window.dispatchEvent(new Event(CHANGED));
}

export function useRoute(): Route {
  const [route, set] = useState(current());
  useEffect(() => {
    const look = () => set(current());
    for (const name of ["popstate", "hashchange", CHANGED]) window.addEventListener(name, look);
    return () => {
      for (const name of ["popstate", "hashchange", CHANGED]) window.removeEventListener(name, look);
    };
  }, []);
  return route;
}

// A click on a link of ours stays in the page; with a modifier the browser does what it always does.
export function followed(event: MouseEvent): void {
  const link = (event.target as Element).closest?.("a");
  const href = link?.getAttribute("href");
  if (!href || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  if (!href.startsWith("/") && !href.startsWith("#/")) return;
  event.preventDefault();
  go(href);
  window.scrollTo(0, 0);
}
